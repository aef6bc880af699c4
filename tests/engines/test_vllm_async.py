"""`AsyncLLM`: streams, aborts and later requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_stream import Streamed, stream_vllm

ABORTED = {1: 5, 4: 12, 6: 1}


def test_aborts_leave_the_other_requests_as_they_were(
    tiny_llama: Path, proves_drafting: Callable[[Streamed], None]
) -> None:
    draw = random.Random(8)
    prompts = [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 60))] for _ in range(8)]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.6, "seed": 23}]
    sampling = [{**kinds[row % 2], "max_tokens": 60, "ignore_eos": True} for row in range(8)]
    plain = stream_vllm(tiny_llama, prompts, sampling, {})
    drafted = stream_vllm(
        tiny_llama, prompts, sampling, ABORTED, {"method": "token_recycling", "nodes": 32}
    )
    for row, (mine, theirs) in enumerate(zip(drafted.tokens, plain.tokens, strict=True)):
        if row in ABORTED:
            assert ABORTED[row] <= len(mine) < 60
            assert mine == theirs[: len(mine)]
        else:
            assert mine == theirs
    assert drafted.last == plain.last
    proves_drafting(drafted)
