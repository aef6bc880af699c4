"""Methods outside of drafttree, such as the example of docs/adding_a_method.md, in both engines."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from example_method import install_example, install_module
from hosts import Case, Host
from random_prompts import some_prompts

CASE = Case(some_prompts(6), {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True})


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables with which an engine finds both methods."""
    folder = tmp_path_factory.mktemp("methods")
    environment = install_example(folder)
    install_module("undeclared_size", folder)
    return environment


@cache
def plain_tokens(host: Host, model: Path) -> list[list[int]]:
    (plain,), _ = host.run(model, [CASE])
    return plain.tokens


def test_tokens_equal_plain_decoding(
    host: Host, tiny_llama: Path, installed: dict[str, str]
) -> None:
    (drafted,), _ = host.run(
        tiny_llama, [CASE], "prompt-lookup-tree", {"width": 3, "length": 4}, environment=installed
    )
    assert drafted.tokens == plain_tokens(host, tiny_llama)
    assert drafted.counters["draft_tokens"] > drafted.counters["accepted_tokens"] > 0
    assert drafted.counters["steps"] < 6 * 48


@pytest.mark.full
def test_trees_are_cut_to_their_declared_size(
    host: Host, tiny_llama: Path, installed: dict[str, str]
) -> None:
    """20 draft tokens are proposed, 8 are declared.

    vLLM counts acceptance by position, and stops where there are more positions than are declared.
    """
    (drafted,), log = host.run(tiny_llama, [CASE], "undeclared-size", environment=installed)
    assert drafted.tokens == plain_tokens(host, tiny_llama)
    counters = drafted.counters
    assert counters["accepted_tokens"] > 0
    assert counters["draft_tokens"] <= 8 * counters["drafted_steps"]
    assert counters["draft_tokens"] > 7 * counters["drafted_steps"]
    (warning,) = [line for line in log.splitlines() if "UndeclaredSizeDrafter" in line]
    assert "20" in warning
    assert "8" in warning
