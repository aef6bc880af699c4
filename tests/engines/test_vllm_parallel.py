"""Two tensor-parallel ranks agree on drafts, on what is accepted, and on what is primed. Two
data-parallel replicas are engines of their own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lyanna_parts import drafter_for
from random_prompts import some_prompts
from tiny_models import make_first_layers
from top_tokens import top_tokens
from vllm_runs import Answer, Case, run_vllm
from vllm_stream import stream_vllm

from drafttree.budget.recording import read_recording
from lyanna_plugin.checkpoint import save
from recycle_plugin.storage.primed_files import load_primed, primed_file, primed_identity

CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True},
    {"temperature": 0.8, "seed": 1, "max_tokens": 32, "ignore_eos": True},
]


@pytest.mark.full
def test_both_ranks_run_the_forwards_that_prime_the_first(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written when the idle engine has computed all rows."""
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path))
    prompts = [[draw, draw + 1, 7] for draw in range(20, 24)]
    cases = [
        Case(prompts, SETTINGS[0]),
        Case(prompts, SETTINGS[0], after=primed_file(tiny_llama, 8)),
    ]
    environment = TWO_RANKS | {
        "DRAFTTREE_CACHE": str(tmp_path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    method = {"method": "token_recycling", "nodes": 15, "prime": True, "prime_seconds": 0}
    (first, second), log = run_vllm(tiny_llama, cases, method, environment, tensor_parallel_size=2)
    assert "is primed for 512 of 512 tokens" in log
    assert second.tokens == first.tokens
    rows = load_primed(primed_file(tiny_llama, 8), primed_identity(tiny_llama, 8), 512)
    assert (rows == top_tokens(tiny_llama, 8)).float().mean() > 0.995


def test_tokens_equal_plain_decoding(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The first rank drafts."""
    draw = random.Random(3)
    prompts = [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 150))] for _ in range(6)]
    cases = [Case(prompts, SETTINGS * 3), Case(prompts, SETTINGS * 3)]
    engine = {"tensor_parallel_size": 2, "max_num_seqs": 4, "environment": TWO_RANKS}
    plain, _ = run_vllm(tiny_llama, cases, **engine)
    # Copies of the first case's answers would take the place of branches.
    method = {"method": "token_recycling", "nodes": 80, "memory": 0}
    drafted, _ = run_vllm(tiny_llama, cases, speculative=method, **engine)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
    proves_drafting(drafted[-1])


@pytest.mark.full
def test_the_first_rank_times_forwards_that_both_run(tiny_llama: Path, tmp_path: Path) -> None:
    """With `auto`, the first rank chooses the number of draft tokens by its own times."""
    file = tmp_path / "%p.jsonl"
    environment = TWO_RANKS | {"DRAFTTREE_RECORD_STEPS": str(file)}
    cases = [Case([[20, 21, 7], [30, 31, 7]], SETTINGS[0])]
    engine = {"tensor_parallel_size": 2, "environment": environment}
    plain, _ = run_vllm(tiny_llama, cases, **engine)
    method = {"method": "token_recycling", "nodes": "auto"}
    drafted, log = run_vllm(tiny_llama, cases, method, **engine)
    assert "cannot be timed" not in log
    assert drafted[0].tokens == plain[0].tokens
    (recording,) = tmp_path.iterdir()
    planner, steps = read_recording(recording)
    # On a busy machine the time for measuring may be over after the first.
    assert 1 in planner.forward_seconds
    assert steps


@pytest.mark.full
@pytest.mark.parametrize("method", ["token_recycling", "rsd", "lyanna"])
def test_data_parallel_replicas(method: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Both replicas serve. A request that joins is not padded to a whole tree; one replica writes
    the file of a hot start."""
    prompts = some_prompts(12) + [[token] for token in range(20, 24)]
    sampling = SETTINGS[:1] * 16 if method == "rsd" else SETTINGS * 8
    plain, _ = stream_vllm(tiny_llama, prompts, sampling, {})
    file = tmp_path / "tables.safetensors"
    options: dict[str, Any] = {"nodes": 32, "prime": False, "hot_start": str(file), "memory": 0}
    if method == "rsd":
        options = {"model": str(make_first_layers(tiny_llama, tmp_path, 1)), "tree": "beam:3x4"}
    if method == "lyanna":
        save(drafter_for(tiny_llama), tmp_path / "drafter")
        options = {"model": str(tmp_path / "drafter")}
    drafted, log = stream_vllm(
        *(tiny_llama, prompts, sampling, {}, {"method": method, **options}),
        data_parallel_size=2,
    )
    assert drafted.tokens == plain.tokens
    assert drafted.last == plain.last
    assert drafted.session == plain.session
    # The counts are those of the first replica.
    assert drafted.counters["accepted_tokens"] > 0
    for replica in ("EngineCore_DP0", "EngineCore_DP1"):
        assert f"({replica}" in log
    assert file.exists() == (method == "token_recycling")
