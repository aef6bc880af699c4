"""With `nodes=auto` on the V2 model runner the scheduler chooses the trees of the steps ahead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forbid_waiting
import pytest
import steady_steps
import v2_on_cpu
from random_prompts import some_prompts
from vllm_runs import Answer, Case, run_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
LIMITS = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "block_size": 32,
}
# Copies of the first answers would take the place of branches.
AUTO = {"nodes": "auto", "memory": 0}
CASES = [
    Case(some_prompts(2), GREEDY, rounds=2),
    Case(some_prompts(4, seed=4, longest=60), GREEDY | {"temperature": 0.8, "seed": 3}),
]


def run(
    model: Path,
    options: dict[str, Any] | None,
    by_row: float,
    cases: list[Case] = CASES,
    **engine: Any,
) -> Any:
    environment = v2_on_cpu.ENVIRONMENT | steady_steps.environment(by_row)
    speculative = options if options is None else {"method": "token_recycling", **options}
    if speculative is not None:
        environment |= forbid_waiting.ENVIRONMENT
    return run_vllm(
        model, cases, speculative=speculative, environment=environment, **{**LIMITS, **engine}
    )


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> list[Answer]:
    answers: list[Answer] = run(tiny_llama, None, 0.0)[0]
    return answers


def chosen(log: str) -> list[tuple[int, int, int]]:
    """Draft tokens, their upper bound, and the number of requests, in the order of the steps."""
    found = re.findall(steady_steps.CHOSEN + r" (\d+) of at most (\d+) for (\d+)", log)
    return [(int(size), int(most), int(requests)) for size, most, requests in found]


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_trees_are_large_where_rows_are_cheap(
    asynchronous: bool,
    tiny_llama: Path,
    plain: list[Answer],
    proves_drafting: Callable[[Answer], None],
) -> None:
    answers, log = run(tiny_llama, AUTO, 1e-6, async_scheduling=asynchronous)
    name = "AsyncTierScheduler" if asynchronous else "TierScheduler"
    assert f"{steady_steps.SCHEDULER} {name}" in log
    for answer, expected in zip(answers, plain, strict=True):
        assert answer.tokens == expected.tokens
        proves_drafting(answer)
    steps = chosen(log)
    assert all(size <= most for size, most, _ in steps)
    sizes = [size for size, _, _ in steps]
    assert {31, 63} & set(sizes[len(sizes) // 2 :])
    assert set(sizes) <= {0, 3, 7, 15, 31, 63}
    # What the scheduler has chosen, a worker explains.
    explained = answers[-1].explained
    assert sum(row["steps"] for row in explained) > 0.5 * len(steps)
    assert {row["num_draft_tokens"] for row in explained} <= set(sizes)
    assert {31, 63} & {row["num_draft_tokens"] for row in explained}
    choices = answers[-1].choices
    last = [(row["num_draft_tokens"], row["most"], row["requests"]) for row in choices]
    assert len(last) > 8
    assert last == steps[-len(last) :] or last == steps[-len(last) - 1 : -1]
    for row in choices:
        assert row["reason"] in {"best", "limit", "rest", "probe", "trial"}
        assert (row["reason"] in {"rest", "probe"}) <= (row["num_draft_tokens"] == 0)
        assert row["ms_63"] > row["ms_0"] > 0
        assert row["tokens_0"] == 1


@pytest.mark.full
def test_nothing_is_drafted_for_long_where_rows_are_dear(
    tiny_llama: Path, plain: list[Answer]
) -> None:
    """Each row takes as long as a plain step, so drafts cannot pay."""
    answers, log = run(tiny_llama, AUTO, 0.05)
    for answer, expected in zip(answers, plain, strict=True):
        assert answer.tokens == expected.tokens
    sizes = [size for size, _, _ in chosen(log)]
    assert sizes.count(0) > 0.9 * len(sizes)
    assert answers[0].iterations >= 0.9 * plain[0].iterations
    reasons = [row["reason"] for row in answers[-1].choices]
    assert reasons.count("rest") + reasons.count("probe") > 0.8 * len(reasons)


def test_requests_that_opt_out_are_scheduled_without_drafts(tiny_llama: Path) -> None:
    """After others, whose drafts paid."""
    opted_out = GREEDY | {"max_tokens": 100, "extra_args": {"drafttree": False}}
    cases = [Case(some_prompts(2), GREEDY, rounds=3), Case(some_prompts(2, seed=9), opted_out)]
    answers, log = run(tiny_llama, AUTO, 1e-6, cases)
    steps = chosen(log)
    before, after = steps[: answers[0].iterations], steps[answers[0].iterations :]
    assert sum(size > 0 for size, _, _ in before) > len(before) // 2
    assert len(after) > 90
    assert not any(size for size, _, _ in after[60:])
