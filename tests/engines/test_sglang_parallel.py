"""Tensor-parallel ranks of SGLang verify the first one's trees. Replicas draft each for its own
requests, and one keeps its tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from top_tokens import top_tokens

from recycle_plugin.storage.primed_files import load_primed, primed_file, primed_identity

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
CASES = [
    Case(some_prompts(8), GREEDY),
    Case(some_prompts(4, seed=4), GREEDY, together=False),
]

CORES = sorted(os.sched_getaffinity(0))
TWO_PROCESSES = {"SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
TWO_RANKS: dict[str, Any] = {"tp_size": 2, "variables": TWO_PROCESSES}


def test_tensor_parallelism(tiny_llama: Path, proves_drafting: Callable[[Answer], None]) -> None:
    penalised = GREEDY | {"frequency_penalty": 0.3}
    cases = [*CASES, Case(some_prompts(6, seed=5), [GREEDY, penalised] * 3)]
    plain, _ = run_sglang(tiny_llama, cases, drafted=False, **TWO_RANKS)
    drafted, _ = run_sglang(tiny_llama, cases, **TWO_RANKS)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)


@pytest.mark.full
def test_both_ranks_run_the_forwards_of_the_first_ones_drafter(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are timed, and those that prime it, until all rows are computed and written."""
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path))
    file = primed_file(tiny_llama, 8)
    cases = [Case(some_prompts(4), GREEDY), Case(some_prompts(4), GREEDY, after=file)]
    plain, _ = run_sglang(tiny_llama, cases[:1], drafted=False, **TWO_RANKS)
    options = {"nodes": "auto", "prime": True, "prime_seconds": 0}
    engine = TWO_RANKS | {"variables": TWO_PROCESSES | {"DRAFTTREE_CACHE": str(tmp_path)}}
    drafted, log = run_sglang(tiny_llama, cases, options, **engine)
    assert [answer.tokens for answer in drafted] == [plain[0].tokens] * 2
    assert "cannot be timed" not in log
    assert "is primed for 512 of 512 tokens" in log
    rows = load_primed(file, primed_identity(tiny_llama, 8), 512)
    assert (rows == top_tokens(tiny_llama, 8)).float().mean() > 0.995


@pytest.mark.full
def test_replicas(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    file = tmp_path / "learned.safetensors"
    plain, _ = run_sglang(tiny_llama, CASES, drafted=False)
    options = {"hot_start": str(file)}
    drafted, log = run_sglang(tiny_llama, CASES, options, dp_size=2, variables=TWO_PROCESSES)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    assert log.count("will not save them, because another engine or replica does") == 1
    assert file.is_file()
