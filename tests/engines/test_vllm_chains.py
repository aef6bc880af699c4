"""vLLM where trees cannot be verified: chains on its own attention and state handling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structured_answers
from drafted_chains import VLLM_ENGINE, proves_chains
from random_prompts import some_prompts
from tiny_families import WITHOUT_TREES, make_tiny_family
from tiny_models import add_byte_tokenizer
from top_tokens import check_primed
from vllm_runs import Answer, Case, run_vllm

from recycle_plugin.storage.primed_files import primed_file

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.5, "max_tokens": 32, "ignore_eos": True}
UNDRAFTED = {"extra_args": {"drafttree": False}}
MIXED = [
    GREEDY,
    SEEDED | {"seed": 3, "logprobs": 2},
    SEEDED | {"seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    SEEDED | {"seed": 5, "top_k": 5, "min_p": 0.02},
    GREEDY | UNDRAFTED,
    GREEDY | {"max_tokens": 3},
]

CHAINS = {"method": "token_recycling"}
ANNOUNCED = "Token Recycling drafts chains of up to"

LONGEST = {"deepseek_v2": 31, "qwen3_next": 7}


def some_cases() -> list[Case]:
    """Many requests at once, one after another, seeded, and with parameters that follow the text.

    With the same prompts again, nearly everything is copied, so the longest chains are accepted.
    """
    prompts = some_prompts(8, seed=5)
    seeded = [SEEDED | {"seed": seed} for seed in range(8)]
    return [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(4, seed=4), GREEDY, together=False),
        Case(prompts, seeded),
        Case(prompts, seeded),
        Case(some_prompts(6, seed=6), MIXED),
    ]


def undrafted(case: Case) -> Case:
    """The case with drafting turned off for each request."""
    many = isinstance(case.sampling, list)
    settings: list[dict[str, Any]] = case.sampling if many else [case.sampling] * len(case.prompts)  # type: ignore[assignment, list-item]
    return replace(case, sampling=[setting | UNDRAFTED for setting in settings])


def check_drafted(family: str, drafted: list[Answer], log: str) -> None:
    for answer in drafted:
        proves_chains(answer.counters, LONGEST[family])
    copied = drafted[3].counters
    assert copied["draft_tokens"] > LONGEST[family] / 2 * copied["drafted_steps"]
    assert copied["accepted_tokens"] > 0.9 * copied["draft_tokens"]
    assert log.count(f"{ANNOUNCED} {LONGEST[family]} tokens and no trees, because the model") == 1


def test_tokens_are_those_of_plain_decoding(without_trees: Callable[[str], Path]) -> None:
    model, engine = without_trees("deepseek_v2"), VLLM_ENGINE["deepseek_v2"]
    plain, _ = run_vllm(model, some_cases(), **engine)
    drafted, log = run_vllm(model, some_cases(), CHAINS, **engine)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    check_drafted("deepseek_v2", drafted, log)


def test_grammars(tmp_path: Path) -> None:
    """What a grammar leaves likely takes the place of drafts, and no tree gets a branch."""
    model = add_byte_tokenizer(make_tiny_family("deepseek_v2", tmp_path, sharpness=3.0))
    grammars = [*structured_answers.GRAMMARS["vllm"].values()]
    bound = [{"temperature": 1.0, "max_tokens": 60, "structured": each} for each in grammars]
    cases = [
        Case(some_prompts(len(bound), seed, 40), [each | {"seed": seed} for each in bound])
        for seed in (1, 2, 3, 2)
    ]
    engine = VLLM_ENGINE["deepseek_v2"] | {"skip_tokenizer_init": False}
    plain, _ = run_vllm(model, cases, **engine)
    drafted, _ = run_vllm(model, cases, CHAINS, **engine)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    for answer in drafted:
        counters = answer.counters
        assert counters["accepted_tokens"] > counters["drafted_steps"] / 10 > 0
        assert counters["non_first_child_accepted"] == counters["kv_rows_moved"] == 0


@pytest.mark.full
def test_recurrent_layers(without_trees: Callable[[str], Path]) -> None:
    """In an engine that may draft, vLLM's code for a CPU rounds the convolutions over a prompt to
    bfloat16 once more than in one that may not. So all tokens are compared with those of undrafted
    requests in such an engine, and with those of an engine without drafts up to the first one
    whose rival there is as likely, in bfloat16.
    """
    cases, engine = some_cases(), VLLM_ENGINE["qwen3_next"]
    model = without_trees("qwen3_next")
    greedy = Case(some_prompts(8), GREEDY | {"logprobs": 2})
    (plain,), _ = run_vllm(model, [greedy], **engine)
    answers, _ = run_vllm(model, [undrafted(case) for case in cases], CHAINS, **engine)
    drafted, log = run_vllm(model, cases, CHAINS, **engine)
    assert [each.tokens for each in drafted] == [each.tokens for each in answers]
    assert all(each.counters["draft_tokens"] == 0 for each in answers)
    check_drafted("qwen3_next", drafted, log)
    equal = 0
    for (ours,), (theirs,), (likely,) in zip(
        drafted[0].tokens, plain.tokens, plain.logprobs, strict=True
    ):
        differs = [mine != other for mine, other in zip(ours, theirs, strict=True)]
        if True in differs:
            best, rival = sorted(likely[differs.index(True)].values(), reverse=True)
            assert best - rival < 0.1
        equal += True not in differs
    assert equal >= 6


@pytest.mark.full
def test_sizes_are_chosen_by_measured_forwards(without_trees: Callable[[str], Path]) -> None:
    """With `nodes=auto` the engine's own dummy steps are timed, with attention and states."""
    for family in WITHOUT_TREES:
        cases = [Case(some_prompts(2), GREEDY, rounds=3)]
        method = CHAINS | {"nodes": "auto"}
        (answer,), log = run_vllm(without_trees(family), cases, method, **VLLM_ENGINE[family])
        assert "forwards cannot be timed" not in log
        assert answer.counters["steps"] > 0
        assert answer.explained
        sizes = {row["num_draft_tokens"] for row in answer.explained}
        assert sizes <= {0, 3, 7, 11, 15, 23, 31}
        assert max(sizes) <= LONGEST[family]


@pytest.mark.full
def test_a_kv_connector(tiny_llama: Path, tmp_path: Path) -> None:
    """It loads the prompts that it has saved, beside the drafts; both models have attention."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engine = {"enable_prefix_caching": False, "block_size": 32}
    cases = [Case(some_prompts(8), GREEDY), Case(some_prompts(8), GREEDY, together=False)]
    plain, _ = run_vllm(tiny_llama, cases, **engine)
    drafted, log = run_vllm(tiny_llama, cases, CHAINS, kv_transfer_config=connector, **engine)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert "External Cache Hit!" in log
    assert "Inject KV cache" in log
    assert f"{ANNOUNCED} 31 tokens and no trees, because kv_transfer_config is set" in log
    for answer in drafted:
        proves_chains(answer.counters, 31)


@pytest.mark.full
def test_a_static_tree(without_trees: Callable[[str], Path]) -> None:
    """Its first path is drafted."""
    cases = [Case(some_prompts(8), GREEDY)]
    model, engine = without_trees("deepseek_v2"), VLLM_ENGINE["deepseek_v2"]
    plain, _ = run_vllm(model, cases, **engine)
    drafted, _ = run_vllm(model, cases, CHAINS | {"tree": "branch:2-2-1-1"}, **engine)
    assert drafted[0].tokens == plain[0].tokens
    proves_chains(drafted[0].counters, 4)


@pytest.mark.full
def test_chunks_of_prompts_beside_chains(without_trees: Callable[[str], Path]) -> None:
    """Recurrent states go on from chunk to chunk, in an engine core of its own process."""
    prompts = some_prompts(8, seed=9, shortest=50, longest=160)
    cases = [Case(prompts, GREEDY), Case(prompts, GREEDY)]
    engine = VLLM_ENGINE["qwen3_next"] | {"max_num_batched_tokens": 64}
    model = without_trees("qwen3_next")
    answers, _ = run_vllm(model, [undrafted(case) for case in cases], CHAINS, **engine)
    own_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    drafted, log = run_vllm(model, cases, CHAINS, environment=own_process, **engine)
    for with_chains, without in zip(drafted, answers, strict=True):
        assert with_chains.tokens == without.tokens
        proves_chains(with_chains.counters, LONGEST["qwen3_next"])
    assert log.count(ANNOUNCED) == 1


SHORT = Case([[5, 9, 11]], GREEDY | {"max_tokens": 3})
"""One step that can be drafted for; without primed rows nothing is known about its root."""
OWN_LOOP = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Lets the engine core run in a process of its own, which waits for requests."""


@pytest.fixture(scope="module")
def unprimed(without_trees: Callable[[str], Path]) -> Answer:
    method = CHAINS | {"prime": False}
    model, engine = without_trees("deepseek_v2"), VLLM_ENGINE["deepseek_v2"]
    (answer,), _ = run_vllm(model, [SHORT], method, OWN_LOOP, **engine)
    return answer


@pytest.mark.full
@pytest.mark.parametrize("seconds", [math.inf, 0])
def test_tables_are_primed(
    seconds: float,
    unprimed: Answer,
    without_trees: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At start, or while the engine has no request; with the token that texts begin with."""
    monkeypatch.setenv("DRAFTTREE_CACHE", str(tmp_path))
    model = without_trees("deepseek_v2")
    file = primed_file(model, 8)
    cases = [SHORT] if seconds else [SHORT, replace(SHORT, after=file)]
    method = CHAINS | {"prime": True, "prime_seconds": seconds, "nodes": 15}
    variables = OWN_LOOP | {"DRAFTTREE_CACHE": str(tmp_path)}
    answers, log = run_vllm(model, cases, method, variables, **VLLM_ENGINE["deepseek_v2"])
    assert "is primed for 512 of 512 tokens" in log
    assert unprimed.counters["drafted_steps"] == 0
    assert answers[-1].tokens == unprimed.tokens
    assert answers[-1].counters["drafted_steps"] == 1
    check_primed(model, share=0.99)
