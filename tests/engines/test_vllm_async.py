"""`AsyncLLM`: streams, aborts, later requests, and sessions of several prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_stream import TURNS, Streamed, stream_vllm

TOKENS = {"v1": 60, "v2": 24}
"""Tokens of each answer, by vLLM's model runner."""
ABORTED = {1: 5, 4: 12, 6: 1}


@pytest.mark.full
@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.full)])
def test_aborts_leave_the_other_requests_as_they_were(
    runner: str, tiny_llama: Path, proves_drafting: Callable[[Streamed], None]
) -> None:
    draw = random.Random(8)
    prompts = [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 60))] for _ in range(8)]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.6, "seed": 23}]
    most = TOKENS[runner]
    sampling = [{**kinds[row % 2], "max_tokens": most, "ignore_eos": True} for row in range(8)]
    plain, _ = stream_vllm(tiny_llama, prompts, sampling, {}, runner=runner)
    drafted, _ = stream_vllm(
        *(tiny_llama, prompts, sampling, ABORTED),
        {"method": "token_recycling", "nodes": {"v1": 32, "v2": 15}[runner]},
        runner,
    )
    for row, (mine, theirs) in enumerate(zip(drafted.tokens, plain.tokens, strict=True)):
        if row in ABORTED:
            assert ABORTED[row] <= len(mine) < most
            assert mine == theirs[: len(mine)]
        else:
            assert mine == theirs
    assert drafted.last == plain.last
    assert drafted.session == plain.session
    assert len(plain.session) == TURNS * most
    proves_drafting(drafted)
