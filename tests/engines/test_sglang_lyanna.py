"""Lyanna in SGLang with Token Recycling's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scripted_shapes
from hosts import Case, Host
from overfitted_drafter import LENGTH, PROMPTS, make_overfitted
from random_prompts import some_prompts

from lyanna_plugin import LyannaOptions

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}


def test_tables_share_the_trees(tiny_llama: Path, tmp_path: Path) -> None:
    """The layer's nodes are at most three deep, and the tables copy what was answered before.

    Prompts of the second case are read in chunks.
    """
    host = Host("sglang")
    make_overfitted(tiny_llama, tmp_path)
    cases = [
        Case(PROMPTS, GREEDY),
        Case(some_prompts(4, seed=5, longest=120), GREEDY),
        Case(PROMPTS[::-1], {**GREEDY, "repetition_penalty": 1.2}),
        Case(PROMPTS[::-1], GREEDY),
    ]
    # With overlapping scheduling plain SGLang's penalties lag by one token.
    plain, _ = host.run(tiny_llama, cases, chunk=32, sglang={"disable_overlap_schedule": True})
    drafted, log = host.run(
        tiny_llama, cases, "lyanna", {"nodes": 12, "tables": True}, tmp_path, chunk=32, running=5
    )
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert "Token Recycling's tables take" in log
    assert all(each.counters["accepted_tokens"] for each in drafted)
    first, again = (each.counters for each in (drafted[0], drafted[-1]))
    assert first["emitted"] / first["steps"] > 2.5
    assert again["emitted"] / again["steps"] > 4.2


@pytest.mark.full
def test_tables_draft_alone_in_some_steps(tiny_llama: Path, tmp_path: Path) -> None:
    """The layer reads later what was accepted meanwhile, and then drafts as well as ever."""
    host = Host("sglang")
    make_overfitted(tiny_llama, tmp_path)
    cases = [Case(PROMPTS, GREEDY), Case(PROMPTS[::-1], GREEDY, reset=True)]
    plain, _ = host.run(tiny_llama, cases)
    options = {"nodes": "auto", "tables": {"memory": 0}}
    drafted, log = host.run(
        *(tiny_llama, cases, "lyanna", options, tmp_path),
        running=5,
        environment=scripted_shapes.ENVIRONMENT,
    )
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    emitted = scripted_shapes.emitted(log)
    assert emitted[0] > 1.2
    for shape in LyannaOptions(model="any", **options).shapes:
        assert emitted[shape.nodes] >= 1 + 0.8 * shape.depth
    for answer in drafted:
        assert answer.counters["drafted_steps"] < answer.counters["steps"]
        assert answer.counters["kv_rows_moved"] > 0
