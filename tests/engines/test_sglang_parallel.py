"""Tensor-parallel ranks of SGLang verify the first one's trees, or draft with it where each has a
part of a model. Replicas draft each for its own requests, and one keeps its tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from joint_distribution import exact_joint, p_value
from lyanna_parts import drafter_for
from overfitted_drafter import LENGTH, PROMPTS, make_overfitted
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from structured_answers import GRAMMARS, check_form, make_drafter, make_model, text_of
from tiny_families import make_tiny_family
from tiny_models import make_first_layers, make_tiny_llama
from top_tokens import check_primed

from lyanna_plugin.checkpoint import save
from recycle_plugin.storage.primed_files import primed_file

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
SAMPLED: dict[str, Any] = GREEDY | {"temperature": 1.0, "top_p": 0.9}
CASES = [
    Case(some_prompts(8), GREEDY),
    Case(some_prompts(4, seed=4), GREEDY, together=False),
    Case(some_prompts(6, seed=5), [GREEDY, GREEDY | {"frequency_penalty": 0.3}] * 3),
    Case(some_prompts(4, seed=6, longest=200), GREEDY),
]
MIXED = Case(CASES[0].prompts, [GREEDY, SAMPLED] * 4)

CORES = sorted(os.sched_getaffinity(0))
TWO_PROCESSES = {"SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
TWO_RANKS: dict[str, Any] = {
    "tp_size": 2,
    "variables": TWO_PROCESSES,
    "chunked_prefill_size": 64,
}


@cache
def plain_answers(model: Path) -> list[Answer]:
    answers, _ = run_sglang(model, CASES, drafted=False, **TWO_RANKS)
    return answers


def test_tensor_parallelism(tiny_llama: Path, proves_drafting: Callable[[Answer], None]) -> None:
    drafted, _ = run_sglang(tiny_llama, CASES, **TWO_RANKS)
    for without, with_trees in zip(plain_answers(tiny_llama), drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)


def check_greedy(model: Path, method: str, drafter: Path, options: dict[str, Any]) -> list[Answer]:
    """Serve with two ranks, and check that greedy requests get plain decoding's tokens."""
    drafted, _ = run_sglang(
        *(model, [*CASES, MIXED], options),
        method=method,
        draft_model=drafter,
        **TWO_RANKS,
    )
    plain = plain_answers(model)
    assert [each.tokens for each in drafted[:-1]] == [each.tokens for each in plain]
    assert drafted[-1].tokens[::2] == plain[0].tokens[::2]
    return drafted


TABLES: dict[str, Any] = {"memory": 0, "prime": False}
RSD: dict[str, dict[str, Any]] = {
    "tables": {"tree": "beam:2x3", "tables": TABLES},
    "tables, shapes": {"tree": "auto", "tables": TABLES},
    "branching": {"tree": "branch:3-2-1"},
    "traversal": {"tree": "beam:3x3", "verify": "traversal"},
}


@pytest.mark.full
@pytest.mark.parametrize(
    "setting",
    [
        "tables",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("tables, shapes", "branching", "traversal")
        ),
    ],
)
def test_rsd(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None], setting: str
) -> None:
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    for answer in check_greedy(tiny_llama, "rsd", draft, RSD[setting]):
        proves_drafting(answer)


def test_lyanna(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Its layer is random, so that nodes of the tables are accepted beside its own."""
    save(drafter_for(tiny_llama), tmp_path)
    for answer in check_greedy(tiny_llama, "lyanna", tmp_path, {"nodes": 12, "tables": TABLES}):
        proves_drafting(answer)


@pytest.mark.full
def test_a_draft_model_that_is_the_target_is_always_accepted(tiny_llama: Path) -> None:
    """It is if all ranks draw the same tokens, and their parts of the KV are of these."""
    length = 41
    cases = [
        Case(prompts, setting | {"max_new_tokens": length})
        for prompts in (CASES[0].prompts, CASES[3].prompts)
        for setting in (GREEDY, SAMPLED)
    ]
    options = {"tree": "branch:1-1-1-1"}
    served, _ = run_sglang(
        tiny_llama, cases, options, method="rsd", draft_model=tiny_llama, **TWO_RANKS
    )
    for case, answer in zip(cases, served, strict=True):
        assert 0 < answer.counters["steps"] <= ceil((length - 1) / 5) * len(case.prompts)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"nodes": 8}, {"nodes": "auto", "head": "whole"}], ids=str)
def test_a_drafter_that_has_memorised_the_answers_is_accepted(
    tiny_llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """It is if each rank's layer is right, with whole embeddings and a whole head."""
    make_overfitted(tiny_llama, tmp_path)
    cases = [Case(PROMPTS, GREEDY | {"max_new_tokens": LENGTH})] * 2
    plain, _ = run_sglang(tiny_llama, cases[:1], drafted=False, **TWO_RANKS)
    drafted, _ = run_sglang(
        *(tiny_llama, cases, options),
        method="lyanna",
        draft_model=tmp_path,
        **TWO_RANKS,
    )
    for answer in drafted:
        assert answer.tokens == plain[0].tokens
        assert answer.counters["emitted"] / answer.counters["steps"] > 3.3


@pytest.mark.full
@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_ranks_bind_the_same_trees_to_grammars(method: str, tmp_path: Path) -> None:
    """SGLang exchanges each token that is sampled then, so all ranks must sample equally often."""
    model = make_model(tmp_path / "model")
    drafter, options = make_drafter(method, model, tmp_path)
    kinds = ["a schema", "a regex", "choices"]
    settings = [{"temperature": 0.0, "max_new_tokens": 90}, {"max_new_tokens": 90}]
    sampling = [GRAMMARS["sglang"][kind] | setting for kind in kinds for setting in settings]
    case = Case(some_prompts(len(sampling), 3, 40), sampling)
    server = TWO_RANKS | {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
    server["constrained_json_disable_any_whitespace"] = True
    (plain,), _ = run_sglang(model, [case], drafted=False, **server)
    (drafted,), _ = run_sglang(model, [case], options, method=method, draft_model=drafter, **server)
    assert drafted.tokens[::2] == plain.tokens[::2]
    ended = [row for row, reason in enumerate(drafted.reasons) if reason == "stop"]
    assert len(ended) >= 4
    for row in ended:
        check_form(kinds[row // 2], text_of(drafted.tokens[row]))
    assert drafted.counters["accepted_tokens"] > 0


SMALL: dict[str, Any] = {"temperature": 1.3, "top_k": 8, "max_new_tokens": 4, "ignore_eos": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("rsd", {"tree": "branch:2-2"}),
        ("rsd", {"tree": "branch:2-2", "tables": {"nodes": 6, "memory": 0, "prime": False}}),
        ("rsd", {"tree": "beam:3x3", "verify": "traversal"}),
        ("lyanna", {"nodes": 12}),
    ],
)
def test_samples_follow_the_targets_distribution(
    method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    target = make_tiny_llama(tmp_path / "target", vocab_size=10, sharpness=3.0)
    drafter = tmp_path / "drafter"
    if method == "rsd":
        make_first_layers(target, drafter, 1)
    else:
        save(drafter_for(target, hot_tokens=10), drafter)
    prompt = [3, 7, 4]
    (answer,), _ = run_sglang(
        *(target, [Case([prompt] * 6000, SMALL)], options),
        method=method,
        draft_model=drafter,
        max_running_requests=64,
        log_level="error",
        **TWO_RANKS,
    )
    assert answer.counters["accepted_tokens"] > 0.2 * answer.counters["steps"]
    assert answer.counters["kv_rows_moved"] > 0
    joint = exact_joint(target, prompt, 10, SMALL["temperature"], SMALL["top_k"])
    assert p_value(answer.tokens, joint) > 0.001


@pytest.mark.full
@pytest.mark.parametrize("method", ["token-recycling", "rsd"])
def test_both_ranks_run_the_forwards_of_the_first_ones_drafter(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Those that are timed, and those that prime it, until all rows are computed and written.

    RSD times none.
    """
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path))
    file = primed_file(tiny_llama, 8)
    cases = [Case(some_prompts(4), GREEDY), Case(some_prompts(4), GREEDY, after=file)]
    plain, _ = run_sglang(tiny_llama, cases[:1], drafted=False, **TWO_RANKS)
    primed: dict[str, Any] = {"prime": True, "prime_seconds": 0}
    options, draft = {"nodes": "auto", **primed}, None
    if method == "rsd":
        options, draft = {"tables": primed}, make_first_layers(tiny_llama, tmp_path / "draft", 1)
    engine = TWO_RANKS | {"variables": TWO_PROCESSES | {"DRAFTTREE_CACHE": str(tmp_path)}}
    drafted, log = run_sglang(
        tiny_llama, cases, options, method=method, draft_model=draft, **engine
    )
    assert [answer.tokens for answer in drafted] == [plain[0].tokens] * 2
    assert "cannot be timed" not in log
    assert "is primed for 512 of 512 tokens" in log
    check_primed(tiny_llama)


@pytest.mark.full
def test_forwards_are_timed_without_an_output_head_of_its_own(tmp_path: Path) -> None:
    model = make_tiny_family("gemma2", tmp_path)
    plain, _ = run_sglang(model, CASES[:1], drafted=False, **TWO_RANKS)
    drafted, log = run_sglang(model, CASES[:1], {"nodes": "auto"}, **TWO_RANKS)
    assert drafted[0].tokens == plain[0].tokens
    assert "cannot be timed" not in log


@pytest.mark.full
def test_replicas(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    file = tmp_path / "learned.safetensors"
    cases = CASES[:2]
    plain, _ = run_sglang(tiny_llama, cases, drafted=False)
    options = {"hot_start": str(file)}
    drafted, log = run_sglang(tiny_llama, cases, options, dp_size=2, variables=TWO_PROCESSES)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    assert log.count("will not save them, because another engine or replica does") == 1
    assert file.is_file()
