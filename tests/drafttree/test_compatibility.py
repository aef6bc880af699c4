"""The table of what works with what says what the checks and the tests do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from drafttree.compatibility import (
    ENGINES,
    Engine,
    _cell,
    features,
    is_in_chains,
    is_refused,
    refused,
)
from drafttree.method import DRAFT_MODEL, HIDDEN_STATE, MODEL_FREE, DrafterKind

ROOT = Path(__file__).resolve().parents[2]
KINDS = (MODEL_FREE, DRAFT_MODEL, HIDDEN_STATE)
DECLARED = {"cuda", "v2-runner"}
"""Features that `HostSupport` declares."""


def consulted(engine: str) -> set[str]:
    """The features that an engine's checks name."""
    files = (ROOT / "drafttree" / engine).glob("*checks.py")
    text = "".join(file.read_text() for file in files)
    return set(re.findall(r'"([a-z0-9-]+)"', text)) & {*features()}


def test_every_test_that_is_named_exists() -> None:
    named = [
        cell.test
        for feature in features().values()
        for engine in ENGINES
        for cell in feature.cells[engine].values()
        if cell.test
    ]
    assert named
    for test in named:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests/engines" / file).read_text(), test


@pytest.mark.parametrize("engine", ENGINES)
def test_the_checks_ask_for_whatever_is_refused(engine: Engine) -> None:
    some = {
        name
        for name in features()
        for kind in KINDS
        if is_refused(engine, kind.name, name) and name not in DECLARED
    }
    assert some == consulted(engine) - DECLARED


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_hosts_declare_is_in_the_table(kind: DrafterKind[Any]) -> None:
    assert is_refused("vllm", kind.name, "v2-runner") == (kind.vllm.runs_v2 is None)
    for engine in ENGINES:
        support = getattr(kind, engine)
        assert is_refused(engine, kind.name, "cuda") == ("cuda" not in support.devices)


def test_kinds_of_other_packages_get_what_every_kind_gets() -> None:
    assert is_refused("vllm", "another", "sliding-windows")
    assert not is_refused("vllm", "another", "lora")
    assert "sliding windows" in " ".join(refused("vllm", "another"))


@pytest.mark.parametrize("text", ["tested", "served", "refused: why", "untested: test.py"])
def test_unknown_states_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="is not a state"):
        _cell(text)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_chains_are_served_by_a_runner_of_their_own(kind: DrafterKind[Any]) -> None:
    for engine in ENGINES:
        served = [name for name in features() if is_in_chains(engine, kind.name, name)]
        assert bool(served) == (getattr(kind, engine).runs_chains is not None)
        assert {*served} <= consulted(engine)


def test_unknown_features_are_errors() -> None:
    with pytest.raises(KeyError):
        is_refused("vllm", "model-free", "window")
