"""Two tensor-parallel ranks agree on drafts, on what is accepted, and on what is primed. Two
data-parallel replicas are engines of their own.

Each run compares the ranks' counts of what was drafted and accepted.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import scripted_shapes
import straying_ranks
import structured_answers
from lyanna_parts import drafter_for
from overfitted_drafter import LENGTH, PROMPTS, make_overfitted
from random_prompts import some_prompts
from tiny_models import make_first_layers, make_tiny_adapter
from top_tokens import check_primed
from vllm_runs import Answer, Case, run_vllm, together
from vllm_stream import stream_vllm

from drafttree.budget.recording import read_recording
from lyanna_plugin.checkpoint import save
from recycle_plugin.storage.primed_files import primed_file

CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
STRAYING = TWO_RANKS | straying_ranks.ENVIRONMENT
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True},
    {"temperature": 0.8, "seed": 1, "max_tokens": 32, "ignore_eos": True},
]

DRAW = random.Random(3)
RANDOM = [[DRAW.randrange(2, 512) for _ in range(DRAW.randrange(4, 150))] for _ in range(6)]
CASES = [
    Case(RANDOM, SETTINGS * 3),
    Case(RANDOM, SETTINGS * 3),
    Case(PROMPTS, {**SETTINGS[0], "max_tokens": LENGTH}),
]
ENGINE: dict[str, Any] = {"tensor_parallel_size": 2, "max_num_seqs": 4}


def make_model(method: str, target: Path, folder: Path) -> dict[str, Any]:
    """The options of a method with a model: the target's first layer for RSD, and for Lyanna a
    random drafter, which drafts in each step."""
    if method == "token_recycling":
        return {}
    if method == "rsd":
        make_first_layers(target, folder, 1)
        return {"model": str(folder)}
    save(drafter_for(target), folder)
    return {"model": str(folder), "nodes": 12, "head": "whole"}


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> list[Answer]:
    """The engine's own answers to `CASES`."""
    answers, _ = run_vllm(tiny_llama, CASES, environment=TWO_RANKS, **ENGINE)
    return answers


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
    check_primed(tiny_llama)


def test_tokens_equal_plain_decoding(
    tiny_llama: Path, plain: list[Answer], proves_drafting: Callable[[Answer], None]
) -> None:
    """The first rank drafts."""
    # Copies of the first case's answers would take the place of branches.
    method = {"method": "token_recycling", "nodes": 80, "memory": 0}
    drafted, _ = run_vllm(tiny_llama, CASES, method, TWO_RANKS, **ENGINE)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)


@pytest.mark.parametrize(
    "options",
    [
        {"tree": "beam:3x4"},
        pytest.param({"tree": "branch:3-2-1", "verify": "traversal"}, marks=pytest.mark.full),
        pytest.param({"tree": "beam:2x3", "tables": {"memory": 0}}, marks=pytest.mark.full),
        pytest.param({"tree": "auto"}, marks=pytest.mark.full),
        pytest.param({"tree": "auto", "tables": {"memory": 0}}, marks=pytest.mark.full),
    ],
    ids=["recursive", "traversal", "tables", "auto", "tables alone or with the draft model"],
)
def test_rsd(
    options: dict[str, Any],
    tiny_llama: Path,
    plain: list[Answer],
    proves_drafting: Callable[[Answer], None],
    tmp_path: Path,
) -> None:
    """Greedy requests beside sampled ones; the second rank would draft otherwise."""
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    method = {"method": "rsd", "model": str(draft), **options}
    shapes = scripted_shapes.ENVIRONMENT if options["tree"] == "auto" else {}
    drafted, log = run_vllm(tiny_llama, CASES, method, STRAYING | shapes, **ENGINE)
    for case, without, with_trees in zip(CASES, plain, drafted, strict=True):
        greedy = slice(0, None, 2 if isinstance(case.sampling, list) else 1)
        assert with_trees.tokens[greedy] == without.tokens[greedy]
        proves_drafting(with_trees)
    if "tables" in options:
        assert min(drafted[-1].hits[name] for name in ("tables", "draft model")) > 0
        assert len(scripted_shapes.kinds(log)) == (3 if shapes else 0)


@pytest.mark.full
@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_grammars_of_trees_that_are_drafted_within_a_step(method: str, tmp_path: Path) -> None:
    """The first rank shows the scheduler its trees.

    RSD's draft model is the target, of whose best tokens most grammars allow few.
    """
    model = structured_answers.make_model(tmp_path / "target")
    drafter, options = structured_answers.make_drafter(method, model, tmp_path)
    if method == "rsd":
        drafter = model
    grammars = structured_answers.GRAMMARS["vllm"] | {"most letters": {"regex": "[^aeiou]*"}}
    settings = [
        SETTINGS[0] | {"ignore_eos": False, "structured": each} for each in grammars.values()
    ]
    case = Case(some_prompts(len(settings), 3, 40), settings, rounds=2)
    engine = ENGINE | {"skip_tokenizer_init": False}
    (without,), _ = run_vllm(model, [case], environment=TWO_RANKS, **engine)
    speculative = {"method": method, "model": str(drafter), **options}
    (drafted,), log = run_vllm(model, [case], speculative, STRAYING, **engine)
    assert drafted.tokens == without.tokens
    assert drafted.counters["accepted_tokens"] > 0
    assert "served without drafts" not in log


@pytest.mark.full
@pytest.mark.parametrize("verify", ["recursive", "traversal"])
def test_rsd_draws_what_one_rank_draws(verify: str, tiny_llama: Path, tmp_path: Path) -> None:
    """For seeds. That the tokens of one rank follow the target is tested elsewhere."""
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    sampled = [{**SETTINGS[1], "temperature": 1.0, "seed": row} for row in range(len(RANDOM))]
    case = Case(RANDOM, sampled)
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x4", "verify": verify}
    (alone,), _ = run_vllm(tiny_llama, [case], method, max_num_seqs=4)
    (drafted,), _ = run_vllm(tiny_llama, [case], method, STRAYING, **ENGINE)
    assert drafted.tokens == alone.tokens
    assert drafted.counters == alone.counters


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_accepted(
    temperature: float, tiny_llama: Path
) -> None:
    """So it has the KV of all accepted tokens on both ranks, also of prompts read in chunks."""
    settings = {**SETTINGS[0], "temperature": temperature, "max_tokens": 61}
    cases = [Case(some_prompts(6, seed=6, longest=300), settings), Case(RANDOM, settings)]
    method = {"method": "rsd", "model": str(tiny_llama), "tree": "branch:1-1-1-1"}
    limits = {**ENGINE, "max_num_batched_tokens": 160}
    drafted, _ = run_vllm(tiny_llama, cases, method, STRAYING, **limits)
    for case, answer in zip(cases, drafted, strict=True):
        assert 0 < answer.counters["steps"] <= ceil(60 / 5) * len(case.prompts)


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 12, "head": "whole"},
        pytest.param({"nodes": 12, "tables": {"memory": 0}}, marks=pytest.mark.full),
        pytest.param({"nodes": "auto"}, marks=pytest.mark.full),
        pytest.param({"nodes": "auto", "tables": {"memory": 0}}, marks=pytest.mark.full),
    ],
    ids=["fixed", "tables", "auto", "tables alone or with the layer"],
)
def test_lyanna(
    options: dict[str, Any],
    tiny_llama: Path,
    plain: list[Answer],
    proves_drafting: Callable[[Answer], None],
    tmp_path: Path,
) -> None:
    """The layer has memorised the answers of the last case, so that its KV is proven correct."""
    make_overfitted(tiny_llama, tmp_path)
    method = {"method": "lyanna", "model": str(tmp_path), **options}
    rests = scripted_shapes.ENVIRONMENT if options["nodes"] == "auto" else {}
    drafted, _ = run_vllm(tiny_llama, CASES, method, STRAYING | rests, **ENGINE)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        assert with_trees.counters["accepted_tokens"] > 0
    proves_drafting(together(drafted))
    known = drafted[-1]
    if rests:
        assert len({row["num_draft_tokens"] for row in known.explained}) >= 4
    else:
        assert known.counters["emitted"] / known.counters["steps"] > 3.3
    if "tables" in options:
        assert min(known.hits[name] for name in ("tables", "draft layer")) > 0


@pytest.mark.full
@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_adapters(method: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Of requests beside ones without. The embeddings and the head are adapted too."""
    (tmp_path / "adapter").mkdir()
    adapter = make_tiny_adapter(tmp_path / "adapter", vocabulary=True)
    case = Case(
        RANDOM, SETTINGS[0], adapters=["adapted", None] * 3, loads={"adapted": str(adapter)}
    )
    engine = {**ENGINE, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    (plain,), _ = run_vllm(tiny_llama, [case], environment=TWO_RANKS, **engine)
    speculative = {"method": method, **make_model(method, tiny_llama, tmp_path / "drafter")}
    (drafted,), _ = run_vllm(tiny_llama, [case], speculative, STRAYING, **engine)
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0


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
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("token_recycling", {"nodes": 32, "prime": False, "memory": 0}),
        ("rsd", {"tree": "beam:3x4"}),
        ("lyanna", {}),
    ],
    ids=["token_recycling", "rsd", "lyanna"],
)
def test_data_parallel_replicas(
    method: str, options: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    """Both replicas serve. A request that joins is not padded to a whole tree; one replica writes
    the file of a hot start."""
    prompts = some_prompts(12) + [[token] for token in range(20, 24)]
    sampling = SETTINGS[:1] * 16 if method == "rsd" else SETTINGS * 8
    plain, _ = stream_vllm(tiny_llama, prompts, sampling, {})
    file = tmp_path / "tables.safetensors"
    speculative = {"method": method, **options}
    speculative |= make_model(method, tiny_llama, tmp_path / "drafter")
    if method == "token_recycling":
        speculative["hot_start"] = str(file)
    drafted, log = stream_vllm(tiny_llama, prompts, sampling, {}, speculative, data_parallel_size=2)
    assert drafted.tokens == plain.tokens
    assert drafted.last == plain.last
    assert drafted.session == plain.session
    # The counts are those of the first replica.
    assert drafted.counters["accepted_tokens"] > 0
    for replica in ("EngineCore_DP0", "EngineCore_DP1"):
        assert f"({replica}" in log
    assert file.exists() == (method == "token_recycling")
