"""Make a small Llama as costly as a large one, with the same logits.

    .venv-vllm/bin/python scripts/setup/make_widened_model.py SMOLLM2_135M WIDE \\
        --hidden 2304 --intermediate 24576 --heads 36 --layers 36

makes a model of 6.7 billion parameters from SmolLM2-135M. Its text and its acceptance of drafts are
those of the small model, and its steps take the time of a model of that size. What is added never
reaches the logits:

- Added channels of the residual stream stay zero. A norm then divides by a value that is smaller by
  the square root of the widening factor, for which its weights and its epsilon compensate. With a
  factor that is a power of four, no rounding changes.
- Added heads, columns of the MLP and layers compute with random weights, and what they write to the
  residual stream is multiplied by zeros.

So o_proj, down_proj and the embedding are zero except for the model's own weights, and all other
added weights are random. On a GPU zeros cost as much as other values in dense matrix products; a
backend that exploits sparsity would be faster. Weights are written one tensor at a time, so only
one is in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from safetensors import safe_open
from torch import Tensor

from drafttree.bench.machine import WIDENED_FROM

SHARD = 2_000_000_000

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_BESIDE = ("*token*", "vocab*", "merges*", "chat_template*", "generation_config.json")
_SPREAD = 0.02


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama that can be widened."""

    hidden: int
    intermediate: int
    heads: int
    layers: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Read the shape from a config.json."""
        names = "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"
        return cls(*(config[name] for name in names))

    def check(self, old: Shape, group: int) -> None:
        """Check that `old` can be widened to this shape; `group` query heads share a KV head.

        Raises:
            typer.BadParameter: It cannot; the message names the option.
        """
        for name, value in vars(self).items():
            if value < (least := getattr(old, name)):
                raise typer.BadParameter(f"--{name} {value} is less than the model's {least}")
        times, rest = divmod(self.hidden, old.hidden)
        if rest or times not in (4**power for power in range(times.bit_length())):
            raise typer.BadParameter(
                f"--hidden {self.hidden} is not the model's {old.hidden} times 4, 16 or another "
                "power of 4: its norms would be rounded otherwise"
            )
        if self.heads % group:
            raise typer.BadParameter(
                f"--heads {self.heads} is not a multiple of {group}, the query heads of a KV head"
            )
        if self.hidden % self.heads:
            raise typer.BadParameter(f"--heads {self.heads} does not divide --hidden {self.hidden}")


class Weights:
    """The tensors of a folder's safetensors files, all of one data type."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                self._files |= dict.fromkeys(opened.keys(), file)
        if not self._files:
            raise typer.BadParameter(f"{folder} contains no safetensors files")
        self.dtype = self[next(iter(self._files))].dtype
        if self.dtype not in _DTYPES:
            raise typer.BadParameter(f"cannot widen weights of {self.dtype}")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def check(self, names: set[str]) -> None:
        """Check that the files have exactly these tensors, all of one data type.

        Raises:
            typer.BadParameter: They have not, so this is another kind of model.
        """
        if missing := names - set(self._files):
            raise typer.BadParameter(f"cannot widen a model without {min(missing)}")
        if further := set(self._files) - names:
            raise typer.BadParameter(f"cannot widen a model with {min(further)}")
        for name in names:
            if (dtype := self[name].dtype) != self.dtype:
                raise typer.BadParameter(f"{name} is {dtype}, other weights are {self.dtype}")


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


class Widening:
    """The widened weights of a model.

    Args:
        weights: Weights of the model.
        config: The model's config.json.
        shape: Shape of the widened model, which `Shape.check` has accepted.
        seed: Seed of the random weights.
        device: Device on which to make weights.
    """

    def __init__(
        self, weights: Weights, config: dict[str, Any], shape: Shape, seed: int, device: str
    ) -> None:
        self._weights, self._config = weights, config
        self._old, self._new = Shape.of(config), shape
        self._head_size = head_size_of(config)
        self._group = group_of(config)
        # A power of two, so that no weight is rounded.
        self._scale = (self._old.hidden / shape.hidden) ** 0.5
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensors(self) -> Iterator[Planned]:
        """The widened tensors, in the order of their use."""
        vocab, hidden = self._config["vocab_size"], self._new.hidden
        yield self._writing("model.embed_tokens.weight", (vocab, hidden))
        for layer in range(self._new.layers):
            yield from self._layer(layer)
        yield self._norm("model.norm.weight")
        if not self._config.get("tie_word_embeddings"):
            yield self._reading("lm_head.weight", (vocab, hidden))

    def _layer(self, layer: int) -> Iterator[Planned]:
        new = self._new
        query, kv = (heads * self._head_size for heads in (new.heads, new.heads // self._group))
        before = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield self._norm(f"{before}{name}.weight")
        for name, rows in (
            *(("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
            *(("mlp.gate_proj", new.intermediate), ("mlp.up_proj", new.intermediate)),
        ):
            yield self._reading(f"{before}{name}.weight", (rows, new.hidden))
        for name, columns in (("self_attn.o_proj", query), ("mlp.down_proj", new.intermediate)):
            yield self._writing(f"{before}{name}.weight", (new.hidden, columns))

    def _reading(self, name: str, shape: tuple[int, int]) -> Planned:
        """A weight that reads the residual stream: its added values are random."""

        def make() -> Tensor:
            wide = torch.randn(
                shape,
                generator=self._generator,
                dtype=self._weights.dtype,
                device=self._generator.device,
            )
            return self._fill(wide.mul_(_SPREAD), name)

        return Planned(name, shape, make)

    def _writing(self, name: str, shape: tuple[int, int]) -> Planned:
        """A weight that writes to the residual stream: its added values are zero."""
        return Planned(name, shape, lambda: self._fill(self._full(shape, 0.0), name))

    def _norm(self, name: str) -> Planned:
        shape = (self._new.hidden,)
        return Planned(
            name, shape, lambda: self._fill(self._full(shape, 1.0), name).mul_(self._scale)
        )

    def _full(self, shape: tuple[int, ...], value: float) -> Tensor:
        return torch.full(shape, value, dtype=self._weights.dtype, device=self._generator.device)

    def _fill(self, wide: Tensor, name: str) -> Tensor:
        """Copy the model's own weights to the beginning, if it has that tensor."""
        if name in self._weights:
            own = self._weights[name]
            wide[tuple(slice(size) for size in own.shape)] = own
        return wide


def group_of(config: dict[str, Any]) -> int:
    """The number of query heads that share a KV head."""
    heads: int = config["num_attention_heads"]
    return heads // int(config.get("num_key_value_heads") or heads)


def head_size_of(config: dict[str, Any]) -> int:
    """The size of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def split(planned: list[Planned], dtype: torch.dtype, most: int) -> list[list[Planned]]:
    """Distribute the tensors over files of at most `most` bytes, or of one tensor."""
    files: list[list[Planned]] = []
    room = 0
    for tensor in planned:
        size = prod(tensor.shape) * dtype.itemsize
        if not files or size > room:
            files.append([])
            room = most
        files[-1].append(tensor)
        room -= size
    return files


def write_file(planned: list[Planned], dtype: torch.dtype, file: Path) -> None:
    """Write a safetensors file; its header comes first, before any tensor is made."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in planned:
        start, end = end, end + prod(tensor.shape) * dtype.itemsize
        entry = {"dtype": _DTYPES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        header[tensor.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor in track(planned, file.name, transient=True):
            opened.write(tensor.make().cpu().view(torch.uint8).numpy())


def write_weights(planned: list[Planned], dtype: torch.dtype, folder: Path) -> int:
    """Write all files and their index, and return the number of parameters."""
    files = split(planned, dtype, SHARD)
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(tensors, dtype, folder / name)
        places |= {tensor.name: name for tensor in tensors}
    parameters = sum(prod(tensor.shape) for tensor in planned)
    index = {"metadata": {"total_size": parameters * dtype.itemsize}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return parameters


def widened_config(config: dict[str, Any], shape: Shape, name: str) -> dict[str, Any]:
    """The widened config.json, which also names the original model and its shape."""
    old = Shape.of(config)
    return {
        **config,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // group_of(config),
        "num_hidden_layers": shape.layers,
        "head_dim": head_size_of(config),
        "rms_norm_eps": config["rms_norm_eps"] * old.hidden / shape.hidden,
        WIDENED_FROM: {"model": name, **asdict(old)},
    }


def read_config(model: Path) -> dict[str, Any]:
    """The config.json of a Llama.

    Raises:
        typer.BadParameter: There is none, or it is another kind of model.
    """
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read the model's config.json: {error}") from error
    if (kind := config.get("model_type")) != "llama":
        raise typer.BadParameter(f"cannot widen a model of type {kind!r}, only llama")
    return config


def main(
    model: Path,
    output: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    hidden: Annotated[
        int | None, typer.Option(help="Hidden size: the model's times a power of 4.")
    ] = None,
    intermediate: Annotated[int | None, typer.Option(help="Columns of the MLP.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    layers: int | None = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    device: Annotated[str, typer.Option(help="Device to make weights on: cpu or cuda.")] = "cpu",
) -> None:
    """Widen a model; dimensions that are not given stay as they are."""
    config = read_config(model)
    old = Shape.of(config)
    given = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "layers": layers}
    shape = replace(old, **{name: size for name, size in given.items() if size is not None})
    shape.check(old, group_of(config))
    if output.exists():
        raise typer.BadParameter(f"{output} exists already")
    weights = Weights(model)
    own, wide = (
        Widening(weights, config, each, seed, torch.device(device)) for each in (old, shape)
    )
    weights.check({tensor.name for tensor in own.tensors()})
    output.mkdir(parents=True)
    for file in (file for pattern in _BESIDE for file in model.glob(pattern)):
        shutil.copy(file, output)
    parameters = write_weights(list(wide.tensors()), weights.dtype, output)
    # The configuration is written last, so that an incomplete model cannot be loaded.
    text = json.dumps(widened_config(config, shape, model.resolve().name), indent=2)
    (output / "config.json").write_text(text + "\n")
    typer.echo(f"{output}: {parameters / 1e9:.3f}B parameters")


if __name__ == "__main__":
    typer.run(main)
