"""Requests with structured output are drafted for, and their answers are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_chunks
import structured_answers
from random_prompts import some_prompts
from structured_answers import (
    CHOICES,
    MERGES,
    check_form,
    make_drafter,
    make_model,
    text_of,
)
from tiny_models import add_byte_tokenizer, make_tiny_llama
from v2_on_cpu import LIMITS, check_runner, for_runner
from vllm_runs import Answer, Case, run_vllm
from vllm_v2_runs import run_v2

RECYCLE = {"method": "token_recycling", "nodes": 15}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 90}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 90}

GRAMMARS = structured_answers.GRAMMARS["vllm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bytes"))


def bound_cases(settings: list[dict[str, Any]], **case: Any) -> Case:
    """One request for each grammar and setting, and one without a grammar."""
    sampling = [
        setting | ({"structured": grammar} if grammar else {})
        for grammar in [*GRAMMARS.values(), None]
        for setting in settings
    ]
    return Case(some_prompts(len(sampling), 3, 40), sampling, **case)


def check_forms(case: Case, answer: Answer) -> int:
    """Check the answers of `bound_cases` that have ended by themselves; returns how many have."""
    assert isinstance(case.sampling, list)
    kinds = [*GRAMMARS]
    ended = 0
    for row, (tokens, reasons) in enumerate(zip(answer.tokens, answer.reasons, strict=True)):
        grammar = case.sampling[row].get("structured")
        if grammar is not None and reasons == ["stop"]:
            check_form(kinds[[*GRAMMARS.values()].index(grammar)], text_of(tokens[0]))
            ended += 1
    return ended


ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_num_seqs": 6,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
CASES = {
    "greedy and sampled": bound_cases([GREEDY, SEEDED, SEEDED | {"seed": 6, "top_p": 0.9}]),
    "again": bound_cases([GREEDY], rounds=2),
}


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Answer]:
    answers, _ = run_vllm(model, [*CASES.values()], **ENGINE)
    return answers


def test_answers_equal_plain_decoding(
    model: Path, plain: list[Answer], proves_drafting: Callable[[Answer], None]
) -> None:
    """All kinds of grammar beside requests without one; greedy and seeded."""
    drafted, log = run_vllm(model, [*CASES.values()], RECYCLE, **ENGINE)
    for case, without, with_trees in zip(CASES.values(), plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
        assert check_forms(case, with_trees) >= 4
    forced = drafted[-1].accepted["sources"][0]
    assert forced["source"] == "forced by a grammar"
    assert forced["hit"] == forced["tried"] > 0
    assert "served without drafts" not in log


@pytest.mark.full
def test_forced_texts_are_drafted(tmp_path: Path) -> None:
    """The model spells some as its tokenizer does, and others in another way."""
    model = make_model(tmp_path, MERGES)
    settings = [GREEDY, *(SEEDED | {"seed": seed} for seed in range(5))]
    bound = {"structured": {"regex": "((a|b)green(a|b)yellow){2,4}"}}
    case = Case(some_prompts(6, 3, 40), [each | bound for each in settings], rounds=2)
    (without,), _ = run_vllm(model, [case], **ENGINE)
    (with_trees,), _ = run_vllm(model, [case], RECYCLE, **ENGINE)
    assert with_trees.tokens == without.tokens
    sources = {each["source"]: each for each in with_trees.accepted["sources"]}
    spelled = sources["likely under a grammar"]
    assert 0 < spelled["hit"] < spelled["tried"]


@pytest.mark.parametrize("executor", [pytest.param("uni", marks=pytest.mark.full), "mp"])
@pytest.mark.parametrize("method", ["rsd", pytest.param("lyanna", marks=pytest.mark.full)])
def test_trees_that_are_drafted_within_a_step(
    method: str, executor: str, model: Path, plain: list[Answer], tmp_path: Path
) -> None:
    """RSD's seeds give other tokens than plain decoding's, but its answers have their form too.

    With `mp` the worker runs in another process than the scheduler, as in servers on a CPU.
    """
    drafter, options = make_drafter(method, model, tmp_path)
    speculative = {"method": method, "model": str(drafter), **options}
    drafted, log = run_vllm(
        model, [*CASES.values()], speculative, distributed_executor_backend=executor, **ENGINE
    )
    for case, without, with_trees in zip(CASES.values(), plain, drafted, strict=True):
        assert isinstance(case.sampling, list)
        for setting, ours, theirs in zip(
            case.sampling, with_trees.tokens, without.tokens, strict=True
        ):
            if method == "lyanna" or not setting["temperature"]:
                assert ours == theirs
        assert check_forms(case, with_trees) >= 4
        assert with_trees.counters["accepted_tokens"] > 0
    assert drafted[0].counters["non_first_child_accepted"] > 0
    assert drafted[0].counters["kv_rows_moved"] > 0
    assert "served without drafts" not in log


@pytest.mark.full
@pytest.mark.parametrize(("is_async", "executor"), [(True, "uni"), (True, "mp"), (False, "uni")])
def test_on_v2(
    is_async: bool, executor: str, model: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """On V2 the scheduler learns of a step's trees when the step has begun.

    Without asynchronous scheduling, each request's logits are masked and sampled by themselves.
    """
    every = bound_cases([GREEDY])
    assert isinstance(every.sampling, list)
    short = {"max_tokens": 28}
    settings = [
        (SEEDED if row % 2 else GREEDY) | short | {"structured": each.get("structured")}
        for row, each in enumerate(every.sampling)
    ]
    case = Case(every.prompts, settings, rounds=2)
    engine = {
        "structured_outputs_config": ENGINE["structured_outputs_config"],
        "async_scheduling": is_async,
        "distributed_executor_backend": executor,
    }
    (without,), _ = run_v2(model, [case], engine=engine)
    environment = {} if is_async else small_chunks.ENVIRONMENT
    (with_trees,), log = run_v2(
        model, [case], "token_recycling", environment=environment, engine=engine, nodes=7
    )
    assert with_trees.tokens == without.tokens
    proves_drafting(with_trees)
    assert check_forms(case, with_trees) >= 2
    assert "served without drafts" not in log


@pytest.mark.full
def test_the_masks_of_roots_are_not_enough(model: Path, plain: list[Answer]) -> None:
    """Negative control: each node gets the mask of its root."""
    drafted, _ = run_vllm(
        model,
        [*CASES.values()],
        RECYCLE,
        planted_fault="root's grammar",
        **ENGINE,
    )
    assert drafted[0].counters["draft_tokens"] > 0
    assert drafted[0].tokens != plain[0].tokens


@pytest.mark.full
@pytest.mark.parametrize("backend", ["guidance", "outlines"])
def test_other_backends(backend: str, model: Path) -> None:
    kinds = ["a schema", "a regex", "choices"]
    sampling = [
        setting | {"structured": GRAMMARS[kind]}
        for kind in kinds
        for setting in (GREEDY, SEEDED, SEEDED | {"seed": 8})
    ]
    case = Case(some_prompts(len(sampling), 3, 40), sampling, rounds=2)
    engine = ENGINE | {"structured_outputs_config": {"backend": backend}}
    (without,), _ = run_vllm(model, [case], **engine)
    (with_trees,), log = run_vllm(model, [case], RECYCLE, **engine)
    assert with_trees.tokens == without.tokens
    assert with_trees.counters["accepted_tokens"] > with_trees.counters["steps"] / 2
    assert check_forms(case, with_trees) >= 4
    assert "served without drafts" not in log


@pytest.mark.full
def test_chunked_prompts_preemption_and_prefix_hits(
    model: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """A grammar's state survives whatever happens to the request's KV."""
    many = bound_cases([GREEDY, SEEDED])
    long = Case(some_prompts(len(many.prompts), 2, 300, 150), many.sampling)
    again = Case(long.prompts, long.sampling)
    engine = ENGINE | {"max_num_batched_tokens": 96, "max_model_len": 512, "block_size": 32}
    whole, _ = run_vllm(model, [long], **ENGINE | {"max_num_batched_tokens": 4096})
    (cramped,), _ = run_vllm(model, [long], RECYCLE, **engine, num_gpu_blocks_override=18)
    (first, second), _ = run_vllm(model, [long, again], RECYCLE, **engine)
    for answer in (cramped, first, second):
        assert answer.tokens == whole[0].tokens
        proves_drafting(answer)
    assert cramped.preemptions > 0
    assert max(each or 0 for each in second.cached) >= 32


THINK, END_OF_THINKING = 258, 259


@pytest.mark.full
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_reasoning_model_thinks_freely(runner: str, tmp_path: Path) -> None:
    """The grammar binds what follows the thoughts, whose end may be anywhere in a tree."""
    model = add_byte_tokenizer(
        make_tiny_llama(tmp_path, sharpness=3.0),
        special={THINK: "<think>", END_OF_THINKING: "</think>"},
    )
    biased = {"logit_bias": {END_OF_THINKING: 6.0}, "max_tokens": 60}
    case = Case(
        [[*prompt, THINK] for prompt in some_prompts(9, 3, 30)],
        [
            setting | biased | {"structured": {"choice": CHOICES}}
            for seed in range(3)
            for setting in (GREEDY, SEEDED | {"seed": seed}, SEEDED | {"seed": 10 + seed})
        ],
        rounds=2,
    )
    engine: dict[str, Any] = {
        **(LIMITS if runner == "v2" else {}),
        **ENGINE,
        "max_num_seqs": 4,
        "environment": for_runner(runner),
        "structured_outputs_config": {"reasoning_parser": "deepseek_r1"},
    }
    (without,), _ = run_vllm(model, [case], **engine)
    (with_trees,), log = run_vllm(model, [case], RECYCLE | {"nodes": 7}, **engine)
    check_runner(runner, log)
    assert with_trees.tokens == without.tokens
    assert with_trees.counters["accepted_tokens"] > 0
    thought = 0
    for (tokens,), reasons in zip(with_trees.tokens, with_trees.reasons, strict=True):
        if reasons == ["stop"]:
            end = tokens.index(END_OF_THINKING)
            assert text_of(tokens[end + 1 :]) in CHOICES
            thought += end > 1
    assert thought > 2
