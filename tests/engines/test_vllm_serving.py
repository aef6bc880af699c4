"""Scheduling of requests does not change their tokens, and does not stop drafting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from v2_on_cpu import check_runner, for_runner
from vllm_runs import Answer, Case, run_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
RECYCLE = {"method": "token_recycling"}


def prompts(count: int, shortest: int, longest: int, seed: int = 9) -> list[list[int]]:
    return some_prompts(count, seed, longest + 1, shortest)


on_both_runners = pytest.mark.parametrize(
    "runner", ["v1", pytest.param("v2", marks=pytest.mark.full)]
)
SIZES: dict[str, dict[str, Any]] = {"v1": {}, "v2": {"nodes": 15}}
"""Options by model runner: V2 runs in Triton's interpreter, for which trees of 80 are large."""


def both(
    model: Path,
    cases: list[Case],
    options: dict[str, Any] | None = None,
    runner: str = "v1",
    **engine: Any,
) -> tuple[list[Answer], list[Answer], str]:
    engine["environment"] = for_runner(runner)
    plain, _ = run_vllm(model, cases, **engine)
    speculative = RECYCLE | SIZES[runner] | (options or {})
    drafted, log = run_vllm(model, cases, speculative=speculative, **engine)
    return plain, drafted, check_runner(runner, log)


def test_chunked_prefill_beside_truncated_trees(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Prompts of several chunks, and a token budget that truncates every tree.

    Plain vLLM on a CPU fails with seeds and chunked prefill, so seeded requests are compared with
    an engine that runs without chunks.
    """
    greedy = Case(prompts(12, 150, 320), GREEDY)
    seeded = Case(prompts(6, 150, 320), GREEDY | {"temperature": 0.6, "seed": 5}, reset=True)
    plain, _ = run_vllm(tiny_llama, [greedy], max_num_batched_tokens=128, max_num_seqs=4)
    whole, _ = run_vllm(tiny_llama, [seeded], max_num_batched_tokens=2048, max_num_seqs=4)
    drafted, log = run_vllm(
        tiny_llama,
        [greedy, seeded],
        speculative=RECYCLE,
        max_num_batched_tokens=128,
        max_num_seqs=4,
    )
    for without, with_trees in zip(plain + whole, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    assert drafted[0].counters["draft_tokens"] < 50 * drafted[0].counters["drafted_steps"]
    assert "A budget of 128 tokens per step truncates draft trees to 31 of 80 draft tokens" in log
    _, wrong, rest = log.partition("min_p and logit_bias parameters won't work")
    assert wrong
    assert "Requests may set min_p and logit_bias" in rest


@pytest.mark.full
@pytest.mark.parametrize("budget", [1024, 48])
def test_requests_that_join_with_one_token_to_read(
    budget: int, tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Prompts of one token, and prompts whose tokens but the last are cached, beside decoding ones.

    The engine's own speculation pads such requests to a whole draft, so they would never be
    scheduled if a step has fewer tokens than that.
    """
    whole_blocks = prompts(3, 257, 257)
    settings: list[dict[str, Any]] = [GREEDY | {"max_tokens": 5 + row} for row in range(15)]
    mixed = [prompt for row in range(5) for prompt in ([row + 2], *prompts(2, 2, 40, seed=row))]
    again = [*whole_blocks, [7], [9]]
    cases = [Case(whole_blocks, GREEDY), Case(again, GREEDY), Case(mixed, settings)]
    plain, drafted, _ = both(tiny_llama, cases, max_num_seqs=4, max_num_batched_tokens=budget)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)


@on_both_runners
def test_prefix_hits_of_answers_that_were_drafted(
    runner: str, tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The second turn's cached prefix contains KV rows that were moved after verification."""
    first = Case(prompts(6, 200, 260), GREEDY | {"max_tokens": 200})
    (answer,), _ = run_vllm(tiny_llama, [first])
    turn_two = [
        prompt + samples[0] + extra
        for prompt, samples, extra in zip(
            first.prompts, answer.tokens, prompts(6, 5, 9, seed=1), strict=True
        )
    ]
    turns = [first, Case(turn_two, GREEDY), Case(turn_two, GREEDY)]
    # Copies of the first turn would take the place of branches.
    plain, drafted, _ = both(tiny_llama, turns, {"memory": 0}, runner)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)


@on_both_runners
def test_running_into_max_model_len(
    runner: str, tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    case = Case(prompts(6, 60, 90), GREEDY | {"max_tokens": None}, rounds=2)
    plain, drafted, _ = both(tiny_llama, [case], runner=runner, max_model_len=128)
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].reasons == plain[0].reasons == [["length"]] * 6
    proves_drafting(drafted[0])


@on_both_runners
def test_requests_that_join_leave_and_opt_out(
    runner: str, tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Requests of many lengths come and go; every third opts out of drafting."""
    settings: list[dict[str, Any]] = [
        GREEDY
        | {"max_tokens": 1 + 7 * row % 41}
        | ({"extra_args": {"drafttree": False}} if row % 3 == 0 else {})
        for row in range(24)
    ]
    plain, drafted, _ = both(
        tiny_llama, [Case(prompts(24, 3, 50), settings)], runner=runner, max_num_seqs=5
    )
    assert drafted[0].tokens == plain[0].tokens
    proves_drafting(drafted[0])
    counters = drafted[0].counters
    undrafted = sum(each["max_tokens"] - 1 for each in settings[::3])
    assert counters["steps"] - counters["drafted_steps"] >= undrafted


def test_no_running_request_waits_because_others_draft(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """With 64 requests and a budget of 1,024 tokens, every decode step schedules all requests."""
    case = Case(prompts(64, 4, 12), GREEDY, rounds=2)
    (drafted,), _ = run_vllm(
        tiny_llama, [case], speculative=RECYCLE, max_num_seqs=64, max_num_batched_tokens=1024
    )
    (plain,), _ = run_vllm(tiny_llama, [case], max_num_seqs=64, max_num_batched_tokens=1024)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    counters = drafted.counters
    assert counters["draft_tokens"] <= 15 * counters["drafted_steps"]


def test_trees_of_a_small_share_of_a_step_follow_the_copied_text(tiny_llama: Path) -> None:
    """An answer that is copied from an earlier one fills the 23 draft tokens of a step's share.

    Of a tree of 80 that was cut to them level by level, fewer than eight would be left.
    """
    case = Case(prompts(1, 12, 12), GREEDY | {"max_tokens": 120})
    plain, drafted, _ = both(
        tiny_llama, [case] * 2, {"nodes": 80}, max_num_seqs=1, max_num_batched_tokens=24
    )
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    counters = drafted[1].counters
    assert counters["draft_tokens"] <= 23 * counters["drafted_steps"]
    assert counters["accepted_tokens"] > 12 * counters["drafted_steps"]


@on_both_runners
def test_reloaded_weights(
    runner: str, tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """What was learned from the old weights is forgotten, so drafting starts from nothing again."""
    case = Case(prompts(4, 20, 20), GREEDY)
    plain, drafted, _ = both(
        tiny_llama, [case, Case(case.prompts, GREEDY, reload=True)], runner=runner
    )
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    assert drafted[1].counters == drafted[0].counters


@pytest.mark.full
def test_structured_output_with_a_scheduler_of_the_users_is_served_without_drafts(
    smollm2: Path,
) -> None:
    from transformers import AutoTokenizer

    ask = AutoTokenizer.from_pretrained(smollm2)("The best colour is")["input_ids"]
    free = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    grammar = {"choice": ["green", "yellow ochre"]}
    chosen = {"temperature": 0.0, "max_tokens": 24, "structured": grammar}
    cases = [Case([ask, ask], [chosen, free]), Case([ask], chosen)]
    users = "vllm.v1.core.sched.scheduler.Scheduler"
    plain, drafted, log = both(smollm2, cases, skip_tokenizer_init=False, scheduler_cls=users)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
    assert drafted[0].counters["draft_tokens"] > 0
    assert drafted[1].counters["draft_tokens"] == 0
    why = f"Requests with structured output are served without drafts: scheduler_cls={users!r}"
    assert log.count(why) == 1


@pytest.mark.full
@pytest.mark.parametrize("method", ["ngram", None])
def test_other_methods_stay_the_engines_own(tiny_llama: Path, method: str | None) -> None:
    """An engine that requests no drafttree method logs nothing about draft trees."""
    speculative: dict[str, Any] | None = method and {
        "method": method,
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    (answer,), log = run_vllm(tiny_llama, [Case(prompts(2, 8, 9), GREEDY)], speculative=speculative)
    assert answer.tokens
    assert "Draft trees" not in log


def test_nothing_is_drafted_below_a_token_that_ends_the_request(tiny_llama: Path) -> None:
    """The drafts would copy the whole of the answers that are remembered, beyond their new ends."""
    prompts = some_prompts(8)
    whole = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
    plain, _ = run_vllm(tiny_llama, [Case(prompts, whole)])
    ends = [tokens[0][20] for tokens in plain[0].tokens]
    ended = [whole | {"stop_token_ids": [end]} for end in ends]
    cases = [Case(prompts, whole), Case(prompts, ended), Case(prompts, whole)]
    drafted, _ = run_vllm(tiny_llama, cases, {"method": "token_recycling"})
    for answer, expected in zip(drafted, plain * 3, strict=True):
        for (ours,), (theirs,) in zip(answer.tokens, expected.tokens, strict=True):
            assert ours == theirs[: len(ours)]
    assert all(ours[0][-1] == end for ours, end in zip(drafted[1].tokens, ends, strict=True))
    # The first token comes from the prompt's step. At most a bonus token follows an ending.
    counted = sum(len(tokens[0]) - 1 for tokens in drafted[1].tokens)
    assert drafted[1].counters["accepted_tokens"] > counted / 2
    assert counted <= drafted[1].counters["emitted"] <= counted + len(prompts)
