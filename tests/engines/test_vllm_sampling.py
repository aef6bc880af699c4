"""All sampling parameters give the same tokens with draft trees as without.

With a seed they are equal token for token: each emitted token takes one draw of its request's
generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm_runs import Answer, Case, run_vllm

SHARED: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SEEDED: dict[str, Any] = {**SHARED, "temperature": 0.6, "seed": 17}

SETTINGS: dict[str, dict[str, Any]] = {
    "seeded": SEEDED,
    "top-k": {**SEEDED, "temperature": 0.9, "top_k": 20},
    "top-p": {**SEEDED, "top_p": 0.8},
    "min-p": {**SEEDED, "min_p": 0.05},
    "repetition penalty": {**SEEDED, "repetition_penalty": 1.2},
    "greedy with a repetition penalty": {
        **SHARED,
        "temperature": 0.0,
        "repetition_penalty": 1.1,
    },
    "presence and frequency penalties": {
        **SEEDED,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "allowed tokens": {**SEEDED, "allowed_token_ids": list(range(2, 512, 3))},
    "logit bias": {**SEEDED, "logit_bias": {7: 4.0, 11: -8.0}},
    "stop tokens": {
        "temperature": 0.6,
        "seed": 3,
        "max_tokens": 40,
        "stop_token_ids": list(range(300, 330)),
    },
    "min tokens": {
        "temperature": 0.6,
        "seed": 3,
        "max_tokens": 40,
        "min_tokens": 19,
        "stop_token_ids": list(range(2, 400)),
    },
    "several samples": {**SEEDED, "n": 3},
    "logprobs": {**SEEDED, "logprobs": 4, "prompt_logprobs": 2},
    "greedy with logprobs": {**SHARED, "temperature": 0.0, "logprobs": 4},
}


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 40))] for _ in range(12)]


@cache
def answers(model: Path, drafting: bool) -> dict[str, Answer]:
    cases = [Case(prompts(), setting) for setting in SETTINGS.values()]
    kinds = list(SETTINGS.values())
    mixed: list[dict[str, Any]] = [
        kinds[row % len(kinds)] | {"prompt_logprobs": None, "n": 1} for row in range(len(prompts()))
    ]
    cases.append(Case(prompts(), mixed))
    served, _ = run_vllm(
        model, cases, speculative={"method": "token_recycling"} if drafting else None
    )
    return dict(zip([*SETTINGS, "all in one batch"], served, strict=True))


@pytest.mark.parametrize("setting", [*SETTINGS, "all in one batch"])
def test_tokens_equal_plain_decoding(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None], setting: str
) -> None:
    plain = answers(tiny_llama, False)[setting]
    drafted = answers(tiny_llama, True)[setting]
    assert drafted.tokens == plain.tokens
    assert drafted.reasons == plain.reasons
    proves_drafting(drafted)


@pytest.mark.parametrize("setting", ["logprobs", "greedy with logprobs"])
def test_logprobs_equal_plain_decoding(tiny_llama: Path, setting: str) -> None:
    plain = answers(tiny_llama, False)[setting]
    drafted = answers(tiny_llama, True)[setting]
    for field in ("logprobs", "prompt_logprobs"):
        for mine, theirs in zip(
            flatten(getattr(drafted, field)), flatten(getattr(plain, field)), strict=True
        ):
            assert mine.keys() == theirs.keys()
            for token, logprob in mine.items():
                assert logprob == pytest.approx(theirs[token], abs=1e-3)


def flatten(nested: Any) -> list[dict[int, float]]:
    if isinstance(nested, dict):
        return [nested]
    return [each for inner in nested or [] for each in flatten(inner)]


def test_min_tokens_hold_inside_an_accepted_path(tiny_llama: Path) -> None:
    """Requests would end much earlier without the minimum of 19 tokens."""
    drafted = answers(tiny_llama, True)["min tokens"]
    lengths = [len(sample) for request in drafted.tokens for sample in request]
    assert min(lengths) >= 19
    assert min(lengths) < 40


def test_a_custom_processor_sees_the_path_to_each_node(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    case = Case(prompts(), SEEDED, rounds=2)
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
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "detokenize": True}
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


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.4, "seed": 9}])
def test_a_thinking_budget_ends_inside_an_accepted_path(
    smollm2: Path, proves_drafting: Callable[[Answer], None], sampling: dict[str, Any]
) -> None:
    """The forced end has several tokens; other requests have a large budget or none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ask = tokenizer("Count: one, two, three, four, five, six, seven. Count: one, two,")["input_ids"]
    end = tokenizer(" and so on")["input_ids"]
    settings = [
        {**sampling, "max_tokens": 40, "ignore_eos": True, **budget}
        for budget in (
            {"thinking_token_budget": len(ask) + 8},
            {"thinking_token_budget": len(ask) + 13},
            {"thinking_token_budget": 500},
            {},
        )
    ]
    engine: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "reasoning_config": {"reasoning_start_str": "Count", "reasoning_end_str": " and so on"},
    }
    case = Case([ask] * len(settings), settings, rounds=2)
    (plain,), _ = run_vllm(smollm2, [case], **engine)
    (drafted,), _ = run_vllm(smollm2, [case], speculative={"method": "token_recycling"}, **engine)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    ends = [_position(request[0], end) for request in drafted.tokens]
    assert ends[0] > 0
    assert ends[1] - ends[0] == 5
    assert ends[2] == ends[3] == -1


def _position(tokens: list[int], wanted: list[int]) -> int:
    found = (i for i in range(len(tokens)) if tokens[i : i + len(wanted)] == wanted)
    return next(found, -1)
