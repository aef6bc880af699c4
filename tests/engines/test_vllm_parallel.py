"""Two tensor-parallel ranks agree on drafts and on what is accepted."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_runs import Answer, Case, run_vllm

CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True},
    {"temperature": 0.8, "seed": 1, "max_tokens": 32, "ignore_eos": True},
]


def test_tokens_equal_plain_decoding(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """With `auto`, the first rank chooses the number of draft tokens."""
    draw = random.Random(3)
    prompts = [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 150))] for _ in range(6)]
    cases = [Case(prompts, SETTINGS * 3), Case(prompts, SETTINGS * 3)]
    engine = {"tensor_parallel_size": 2, "max_num_seqs": 4, "environment": TWO_RANKS}
    plain, _ = run_vllm(tiny_llama, cases, **engine)
    method = {"method": "token_recycling", "nodes": "auto"}
    drafted, _ = run_vllm(tiny_llama, cases, speculative=method, **engine)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
    proves_drafting(drafted[-1])
