"""Replicas of one engine in SGLang: each drafts for its own requests, and one keeps its tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang

pytestmark = [pytest.mark.full]

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}


def test_tokens_are_those_of_plain_decoding(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    file = tmp_path / "learned.safetensors"
    cases = [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(4, seed=4), GREEDY, together=False),
    ]
    plain, _ = run_sglang(tiny_llama, cases, drafted=False)
    cores = sorted(os.sched_getaffinity(0))
    each = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    options = {"hot_start": str(file)}
    drafted, log = run_sglang(tiny_llama, cases, options, dp_size=2, variables=each)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    assert log.count("will not save them, because another engine or replica does") == 1
    assert file.is_file()
