"""A widened model has the logits of the small one, and the requested size."""

from __future__ import annotations

import json
from pathlib import Path

import make_widened_model
import pytest
import torch
import typer
from click.testing import Result
from tiny_models import make_tiny_llama
from typer.testing import CliRunner

from drafttree.bench.machine import model_name, shown_options

ALL = ("--hidden", "512", "--intermediate", "640", "--heads", "8", "--layers", "4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def widen(model: Path, output: Path, *options: str) -> Result:
    app = typer.Typer()
    app.command()(make_widened_model.main)
    arguments = [str(model), str(output), *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(2, 42).view(2, 20)
    with torch.inference_mode():
        return model(tokens).logits


def tied(model: Path, folder: Path) -> Path:
    """Save the model with its embedding as its head."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.config.tie_word_embeddings = True
    loaded.lm_head.weight = loaded.model.embed_tokens.weight
    loaded.save_pretrained(folder)
    return folder


def assert_near(after: torch.Tensor, before: torch.Tensor) -> None:
    """Compare up to rounding: sums with additional zero terms may be added in another order."""
    assert (after - before).abs().max() < 4e-6 * before.abs().max()


def test_added_layers_change_no_bit(tiny: Path, tmp_path: Path) -> None:
    result = widen(tiny, tmp_path / "wide", "--layers", "3")
    assert result.exit_code == 0, result.output
    assert torch.equal(logits(tmp_path / "wide"), logits(tiny))


@pytest.mark.parametrize(
    "options", [("--hidden", "512"), ("--intermediate", "640"), ("--heads", "8"), ALL]
)
def test_logits_are_unchanged(tiny: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    result = widen(tiny, tmp_path / "wide", *options)
    assert result.exit_code == 0, result.output
    assert_near(logits(tmp_path / "wide"), logits(tiny))


def test_tied_embeddings_stay_tied(tiny: Path, tmp_path: Path) -> None:
    model = tied(tiny, tmp_path / "tied")
    assert widen(model, tmp_path / "wide", *ALL).exit_code == 0
    assert_near(logits(tmp_path / "wide"), logits(model))
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]


def test_weights_have_the_requested_size_and_are_split(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import safe_open

    monkeypatch.setattr(make_widened_model, "SHARD", 3_000_000)
    wide = tmp_path / "wide"
    assert widen(tiny, wide, *ALL).exit_code == 0
    index = json.loads((wide / "model.safetensors.index.json").read_text())
    files = sorted(wide.glob("*.safetensors"))
    assert len(files) > 2
    found, parameters = {}, 0
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                found[name] = file.name
                tensor = opened.get_tensor(name)
                parameters += tensor.numel()
                if "layers.3." in name and "_proj" in name:
                    writes = "o_proj" in name or "down_proj" in name
                    assert bool((tensor == 0).all()) == writes
        assert file.stat().st_size < 3_100_000
    assert found == index["weight_map"]
    attention, mlp = 512 * (2 * 256 + 2 * 128), 3 * 512 * 640
    assert parameters == 2 * 512 * 512 + 4 * (attention + mlp + 2 * 512) + 512
    assert index["metadata"]["total_size"] == 4 * parameters
    config = json.loads((wide / "config.json").read_text())
    assert config["num_key_value_heads"] == 4
    assert config["drafttree_widened_from"]["hidden"] == 128
    assert model_name(wide) == f"{wide.name}: {tiny.name}, widened"
    assert model_name(tiny) == tiny.name
    assert (wide / "tokenizer.json").read_text() == '{"version": "1.0"}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hidden", "256"), "--hidden 256 is not the model's 128 times 4, 16"),
        (("--hidden", "600"), "--hidden 600 is not the model's 128 times 4, 16"),
        (("--intermediate", "255"), "--intermediate 255 is less than the model's 256"),
        (("--heads", "5"), "--heads 5 is not a multiple of 2"),
        (("--heads", "6"), "--heads 6 does not divide --hidden 128"),
        (("--layers", "1"), "--layers 1 is less than the model's 2"),
    ],
)
def test_what_does_not_fit_is_named(
    tiny: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = widen(tiny, tmp_path / "wide", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "wide").exists()


def test_models_of_another_kind_are_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    result = widen(tmp_path, tmp_path / "wide")
    assert result.exit_code == 2
    assert "cannot widen a model of type 'qwen3'" in result.output
    result = widen(tiny, tiny)
    assert "exists already" in result.output


def test_reports_give_no_folder_of_a_drafter(tmp_path: Path) -> None:
    shown = shown_options({"model": str(tmp_path / "drafter"), "tree": "auto"})
    assert shown == {"model": "drafter", "tree": "auto"}
    assert shown_options({"nodes": 7}) == {"nodes": 7}
