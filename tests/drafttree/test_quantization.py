"""Copies of models with 8-bit weights, and `drafttree quantize`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import add_byte_tokenizer, make_tiny_llama

from drafttree.quantization import quantize, rounded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_byte_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("model")))


def quiet(line: str) -> None:
    """Report nothing."""


def test_linear_layers_alone_are_rounded(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "more" / "copy"
    lines: list[str] = []
    (model / "model.safetensors").chmod(0o644)
    quantize(model, copy, lines.append)
    assert (copy / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert lines == ["Rounding the weights in model.safetensors"]
    own, made = (load_file(folder / "model.safetensors") for folder in (model, copy))
    linear = {name for name in own if name.endswith("_proj.weight")}
    assert len(linear) == 14
    assert made.keys() == own.keys() | {f"{name}_scale" for name in linear}
    for name, weight in own.items():
        if name not in linear:
            assert torch.equal(made[name], weight)
            continue
        scale = made[f"{name}_scale"]
        assert (made[name].dtype, scale.shape) == (torch.int8, (len(weight), 1))
        assert ((made[name] * scale - weight).abs() <= 0.501 * scale).all()
        assert (made[name].abs().amax(1) == 127).all()
    others = {file.name for file in model.iterdir()} - {"config.json", "model.safetensors"}
    assert "tokenizer.json" in others
    for name in others:
        assert (copy / name).read_bytes() == (model / name).read_bytes()
    assert {file.name for file in copy.iterdir()} == {file.name for file in model.iterdir()}
    assert [*copy.parent.iterdir()] == [copy]
    config = json.loads((copy / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head"]
    assert config == json.loads((model / "config.json").read_text())


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -2.0]], dtype=torch.bfloat16)
    values, scale = rounded(weight)
    assert values.tolist() == [[0, 0], [64, -127]]
    assert scale.isfinite().all()


def split(model: Path, folder: Path) -> Path:
    """The same model with its weights in two files."""
    weights = load_file(model / "model.safetensors")
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


def test_weights_in_several_files(model: Path, tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    quantize(split(model, tmp_path / "split"), tmp_path / "copy", quiet)
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in tmp_path.glob("copy/*.safetensors")}
    assert len(files) == 2
    assert {name: file for file, each in files.items() for name in each} == index["weight_map"]
    quantize(model, tmp_path / "whole", quiet)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for each in files.values():
        for name, weight in each.items():
            assert torch.equal(weight, whole[name])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"{}")


def set_architecture(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (remove_weights, r"has no model\.safetensors: name a model in safetensors"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
            r"index\.json is damaged",
        ),
        (remove_a_weight, r"do not have model\.layers\.1\.mlp\.up_proj\.weight"),
        (damage_weights, r"model\.safetensors cannot be read"),
        (lambda folder: set_architecture(folder, model_type="none"), "cannot be read"),
        (
            lambda folder: set_architecture(folder, quantization_config={"quant_method": "fp8"}),
            "is quantized already",
        ),
        (
            lambda folder: set_architecture(
                folder,
                model_type="mixtral",
                num_local_experts=2,
                architectures=["MixtralForCausalLM"],
            ),
            r"such as those of experts, .*: model\.layers\.0\.",
        ),
        (lambda folder: set_architecture(folder, model_type="gpt2"), "has no linear layers"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], None], complaint: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    with pytest.raises(ValueError, match=complaint):
        quantize(folder, tmp_path / "copy", quiet)
    assert [*tmp_path.iterdir()] == [folder], "nothing half-written is left"


def test_weights_in_another_format_are_left_out(model: Path, tmp_path: Path) -> None:
    """Engines would read them in place of those that are quantized."""
    folder = split(model, tmp_path)
    save_file({"weight": torch.ones(1)}, folder / "consolidated.safetensors")
    for name in ("params.json", "consolidated.safetensors.index.json", "notes.json"):
        (folder / name).write_text("{}")
    quantize(folder, tmp_path / "copy", quiet)
    made = {file.name for file in (tmp_path / "copy").iterdir()}
    weights = {"model-0.safetensors", "model-1.safetensors", "model.safetensors.index.json"}
    assert made == weights | {"config.json", "notes.json"}


def test_the_command(model: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("drafttree")), "quantize", str(model)]

    def run(output: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, str(output)], capture_output=True, text=True)

    made = run(tmp_path / "copy")
    assert (made.returncode, made.stdout) == (0, f"{tmp_path / 'copy'}\n")
    assert (tmp_path / "copy" / "model.safetensors").is_file()
    again = run(tmp_path / "copy")
    assert again.returncode == 1
    assert again.stderr == f"drafttree quantize: {tmp_path / 'copy'} exists: name a new folder\n"
