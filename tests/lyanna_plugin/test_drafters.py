"""The drafters that the package ships."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from drafttree.bench.models import ensure
from lyanna_plugin import METHOD
from lyanna_plugin.checkpoint import check, load


@pytest.mark.parametrize("name", METHOD.models)
def test_a_drafter_serves_its_target(name: str) -> None:
    folder, target = METHOD.models[name], ensure(name)
    check(str(target), str(folder))
    drafter = load(folder, target)
    assert len(drafter.token_info.hot_tokens) == drafter.config.num_hot_tokens


@pytest.mark.parametrize("folder", METHOD.models.values(), ids=METHOD.models)
def test_its_card_states_the_hash_of_its_weights(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    assert len(weights) <= 16e6
    assert hashlib.sha256(weights).hexdigest() in (folder / "README.md").read_text()


def test_a_drafter_for_the_demo_is_shipped() -> None:
    assert "smollm2-135m" in METHOD.models
