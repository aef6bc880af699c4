"""Copies of models with 8-bit weights, which are faster draft models.

Weights of linear layers are rounded to 8 bits with one scale for each row, and engines round the
layers' inputs to 8 bits with one scale for each token (W8A8). A draft model needs no calibration:
what it loses in accuracy costs accepted tokens, never the output.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 127
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
_NOT_COPIED = {_INDEX, "params.json", "consolidated.safetensors.index.json"}
"""Files by which engines find weights in other files, as in Mistral's folders."""


def quantize(model: Path, output: Path, report: Callable[[str], None]) -> None:
    """Save a copy of a model with 8-bit linear layers, in the compressed-tensors format.

    The output head and the embeddings stay as they are.

    Args:
        model: Folder of the model, in Hugging Face's layout, with weights in safetensors.
        output: Folder of the copy, which must not exist.
        report: Called with a line for each file of weights.

    Raises:
        ValueError: The model cannot be quantized; the message gives the reason.
        FileExistsError: There is something at `output`.
        OSError: A file cannot be read or written.
    """
    if output.exists():
        raise FileExistsError(f"{output} exists: name a new folder")
    files = _files_of_weights(model)
    linear, head = _linear_layers(model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _quantization_config(head)
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        made = Path(folder) / output.name
        made.mkdir()
        file_of: dict[str, str] = {}
        for file in files:
            report(f"Rounding the weights in {file.name}")
            file_of |= dict.fromkeys(_quantize_file(file, made / file.name, linear), file.name)
        missing = [name for name in linear if f"{name}_scale" not in file_of]
        if missing:
            raise ValueError(f"the files of {model} do not have {missing[0]}")
        if (model / _INDEX).is_file():
            size = sum(file.stat().st_size for file in made.iterdir())
            index = {"metadata": {"total_size": size}, "weight_map": file_of}
            (made / _INDEX).write_text(json.dumps(index, indent=2))
        for file in model.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS and file.name not in _NOT_COPIED:
                shutil.copyfile(file, made / file.name)
        (made / "config.json").write_text(json.dumps(config, indent=2))
        made.rename(output)


def _files_of_weights(model: Path) -> list[Path]:
    """The files with a model's weights.

    Raises:
        ValueError: There are none.
    """
    names = [_WHOLE]
    try:
        index = json.loads((model / _INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        pass
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{model / _INDEX} is damaged: {error!r}") from error
    files = [model / name for name in names]
    for file in (model / "config.json", *files):
        if not file.is_file():
            raise ValueError(f"{model} has no {file.name}: name a model in safetensors")
    return files


def _linear_layers(model: Path) -> tuple[set[str], str]:
    """Names of the weights of a model's linear layers, without its output head, and the head's.

    Raises:
        ValueError: The model's architecture is not served.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        # What transformers raises depends on what is wrong with the file.
        raise ValueError(f"the model in {model} cannot be read: {error}") from error
    if getattr(config, "quantization_config", None):
        raise ValueError(f"the model in {model} is quantized already")
    large = next((name for name, each in module.named_parameters() if each.dim() > 2), None)
    if large is not None:
        raise ValueError(
            f"the model in {model} has weights of more than two dimensions, such as those of "
            f"experts, which are not quantized here: {large}"
        )
    head = module.get_output_embeddings()
    modules = dict(module.named_modules())
    names = {
        f"{name}.weight"
        for name, each in modules.items()
        if isinstance(each, nn.Linear) and each is not head
    }
    if not names:
        raise ValueError(f"the model in {model} has no linear layers")
    return names, next((name for name, each in modules.items() if each is head), "lm_head")


def _quantization_config(head: str) -> dict[str, Any]:
    """The `quantization_config` of the format, for a model with this output head."""
    of_both = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**of_both, "strategy": "channel", "dynamic": False},
                "input_activations": {**of_both, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": [head],
    }


def _quantize_file(file: Path, output: Path, linear: set[str]) -> list[str]:
    """Save a file of weights with those of linear layers in 8 bits; returns the tensors' names."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    made: dict[str, Tensor] = {}
    try:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - this is no dictionary
                weight = weights.get_tensor(name)
                if name in linear:
                    made[name], made[f"{name}_scale"] = rounded(weight)
                else:
                    made[name] = weight
    except SafetensorError as error:
        raise ValueError(f"the weights in {file} cannot be read: {error}") from error
    try:
        save_file(made, output, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{output} cannot be written: {error}") from error
    shutil.copymode(file, output)  # it was made for its owner alone
    return [*made]


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight `[N, K]` to `int8 [N, K]` and one scale for each row, `float32 [N, 1]`."""
    rows = weight.float()
    scale = rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _MOST
    return (rows / scale).round().clamp(-_MOST, _MOST).to(torch.int8), scale
