"""What vLLM alone offers for sampling gives the same tokens with draft trees as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from vllm_runs import Answer, Case, run_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
SEEDED: dict[str, Any] = {**GREEDY, "ignore_eos": True, "temperature": 0.6, "seed": 17}


def test_a_custom_processor_sees_the_path_to_each_node(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    case = Case(some_prompts(12, seed=5, longest=40), SEEDED, rounds=2)
    engine = {"logits_processors": ["vllm_processors:NoParityTwice"]}
    (plain,), _ = run_vllm(tiny_llama, [case], **engine)
    (drafted,), _ = run_vllm(
        tiny_llama, [case], speculative={"method": "token_recycling"}, **engine
    )
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    for request in drafted.tokens:
        for before, after in pairwise(request[0]):
            assert before % 2 != after % 2


def test_stop_strings_and_bad_words(
    smollm2: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Both are given as text, and may lie inside an accepted path."""
    from transformers import AutoTokenizer

    ask = AutoTokenizer.from_pretrained(smollm2)(
        "Count: one, two, three, four, five, six, seven, eight, nine, ten. Count: one, two,"
    )["input_ids"]
    greedy = {**GREEDY, "detokenize": True}
    cases = [
        Case([ask] * 2, greedy | {"ignore_eos": True}),
        Case([ask] * 2, greedy | {"stop": ["seven", "7"]}),
        Case([ask] * 2, greedy | {"bad_words": ["six", "five"]}),
    ]
    plain, _ = run_vllm(smollm2, cases, skip_tokenizer_init=False)
    drafted, _ = run_vllm(
        smollm2,
        cases,
        # A dynamic tree copies the count in two steps, and needs no branches for it.
        speculative={"method": "token_recycling", "tree": "static"},
        skip_tokenizer_init=False,
    )
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        assert with_trees.reasons == without.reasons
        proves_drafting(with_trees)
    assert drafted[1].reasons == [["stop"]] * 2
    assert drafted[2].tokens != drafted[0].tokens


THINKING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.4, "seed": 9},
}


@cache
def thinking_answers(model: Path, drafted: bool) -> dict[str, Answer]:
    from transformers import AutoTokenizer

    ask = AutoTokenizer.from_pretrained(model)(
        "Count: one, two, three, four, five, six, seven. Count: one, two,"
    )["input_ids"]
    budgets: list[dict[str, Any]] = [
        {"thinking_token_budget": len(ask) + 8},
        {"thinking_token_budget": len(ask) + 13},
        {"thinking_token_budget": 500},
        {},
    ]
    cases = [
        Case(
            [ask] * len(budgets),
            [{**sampling, "max_tokens": 40, "ignore_eos": True, **budget} for budget in budgets],
            reset=True,
            rounds=2,
        )
        for sampling in THINKING.values()
    ]
    served, _ = run_vllm(
        model,
        cases,
        speculative={"method": "token_recycling"} if drafted else None,
        skip_tokenizer_init=False,
        reasoning_config={"reasoning_start_str": "Count", "reasoning_end_str": " and so on"},
    )
    return dict(zip(THINKING, served, strict=True))


@pytest.mark.parametrize("sampling", THINKING)
def test_a_thinking_budget_ends_inside_an_accepted_path(
    smollm2: Path, proves_drafting: Callable[[Answer], None], sampling: str
) -> None:
    """The forced end has several tokens; other requests have a large budget or none."""
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(smollm2)(" and so on")["input_ids"]
    drafted = thinking_answers(smollm2, True)[sampling]
    assert drafted.tokens == thinking_answers(smollm2, False)[sampling].tokens
    proves_drafting(drafted)
    ends = [_position(request[0], end) for request in drafted.tokens]
    assert ends[0] > 0
    assert ends[1] - ends[0] == 5
    assert ends[2] == ends[3] == -1


def _position(tokens: list[int], wanted: list[int]) -> int:
    found = (i for i in range(len(tokens)) if tokens[i : i + len(wanted)] == wanted)
    return next(found, -1)
