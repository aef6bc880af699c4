"""Rotary embeddings of Lyanna's layer: their frequencies, and those that are refused on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for, serve
from tiny_models import make_tiny_llama

from lyanna_plugin.checkpoint import load, save
from lyanna_plugin.drafter import LyannaDrafter

ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A target with a type of rotary embeddings."""
    made = make_tiny_llama(tmp_path / "target")
    file = made / "config.json"
    config = json.loads(file.read_text())
    size = config["hidden_size"] // config["num_attention_heads"]
    given = {**ROPE[request.param], "rope_type": request.param, "rope_theta": 10000.0}
    if request.param == "longrope":
        given |= {name: [1.0] * (size // 2) for name in ("short_factor", "long_factor")}
    file.write_text(json.dumps({**config, "rope_parameters": given, "rope_scaling": given}))
    return made


def make_drafter(target: Path, folder: Path, device: str) -> LyannaDrafter:
    save(drafter_for(target), folder)
    return serve(target, folder, device)


@pytest.mark.parametrize("target", ["dynamic", "longrope"], indirect=True)
def test_frequencies_that_follow_positions_are_refused_on_a_gpu(
    target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"has rope_type='(dynamic|longrope)' in its config\.json"):
        make_drafter(target, tmp_path / "drafter", "cuda")
    make_drafter(target, tmp_path / "drafter", "cpu")


@pytest.mark.parametrize("target", ["default", "linear"], indirect=True)
def test_other_frequencies_are_served(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    make_drafter(target, folder, "cpu")
    assert not load(folder, target).self_attn.reads_positions


@pytest.mark.parametrize("target", ["default", "linear"], indirect=True)
def test_frequencies_are_not_rounded_to_the_targets_data_type(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save(drafter_for(target), folder)
    layer = serve(target, folder, dtype=torch.bfloat16)._layer
    assert layer._after.dtype == torch.bfloat16
    found = dict(layer._rotary._embedding.named_buffers())
    expected = dict(load(folder, target).self_attn.rotary.named_buffers())
    assert "inv_freq" in found
    for name, exact in expected.items():
        assert found[name].dtype == torch.float32
        assert found[name].tolist() == exact.tolist()
