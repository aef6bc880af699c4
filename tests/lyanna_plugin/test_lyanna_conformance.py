"""Lyanna's drafter, with a layer for a tiny target, is what hosts rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lyanna_parts import drafter_for, predict_embeddings
from tiny_models import make_tiny_llama

from drafttree.testing import check_method, random_target
from lyanna_plugin import METHOD
from lyanna_plugin.checkpoint import save


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), vocab_size=96)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predicts that the next hidden state is the last token's embedding, as the test's target's."""
    module = drafter_for(target)
    predict_embeddings(module)
    folder = tmp_path_factory.mktemp("drafter")
    save(module, folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": 12},
        {"nodes": 12, "fusion": False},
        {"nodes": 12, "resample": False},
        {"nodes": 12, "steps": 1},
        {"nodes": 12, "steps": 4, "table": "float8"},
        {"nodes": 12, "tables": True},
        {"tables": {"sharing": "request"}, "resample": False, "nodes": 30},
        {"tables": True},
    ],
    ids=str,
)
def test_the_drafter_passes(target: Path, drafter: Path, options: dict[str, Any]) -> None:
    given = random_target(vocab_size=96, hidden_size=128, model=str(target))
    assert check_method(METHOD, {"model": str(drafter), **options}, given) > 50
