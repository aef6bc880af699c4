"""All sampling parameters give the same tokens with draft trees as without.

Plain SGLang is run without overlapping scheduling here, with which its penalties lag by one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sglang_runs import Answer, Case, run_sglang

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": GREEDY,
    "frequency and presence penalties": {
        **GREEDY,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
    },
    "repetition penalty": {**GREEDY, "repetition_penalty": 1.1},
    "logit bias": {**GREEDY, "logit_bias": {"7": 4.0, "11": -8.0}},
    "stop tokens": {**GREEDY, "stop_token_ids": list(range(300, 330))},
    "sampled from the best alone": {**GREEDY, "temperature": 0.8, "top_k": 1},
}
UNDRAFTED = ("drafting turned off", "a custom processor")


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 40))] for _ in range(12)]


def cases() -> dict[str, Case]:
    made = {name: Case(prompts(), setting) for name, setting in SETTINGS.items()}
    kinds = list(SETTINGS.values())
    made["all in one batch"] = Case(
        prompts(), [kinds[row % len(kinds)] for row in range(len(prompts()))]
    )
    draw = random.Random(6)
    long = [[draw.randrange(2, 512) for _ in range(1000)] for _ in range(3)]
    made["the context's end"] = Case(long, {**GREEDY, "max_new_tokens": 23}, rounds=2)
    made["logprobs"] = Case(prompts(), GREEDY, logprobs=4)
    made["logprobs and a penalty"] = Case(
        prompts(), SETTINGS["frequency and presence penalties"], logprobs=4
    )
    made["sampled beside greedy"] = Case(
        prompts(),
        [GREEDY if row % 2 else {**GREEDY, "temperature": 1.0} for row in range(len(prompts()))],
    )
    off = {**GREEDY, "custom_params": {"drafttree": False}}
    made["drafting turned off"] = Case(prompts(), off)
    made["a custom processor"] = Case(prompts(), GREEDY, processor="NoEvenTokens")
    made["a request that is aborted"] = Case(prompts(), GREEDY, abort_after={1: 5, 6: 11})
    return made


@cache
def answers(model: Path, drafted: bool, overlap: bool = False) -> dict[str, Answer]:
    served, _ = run_sglang(
        model,
        list(cases().values()),
        drafted=drafted,
        disable_overlap_schedule=not overlap,
        enable_custom_logit_processor=True,
    )
    return dict(zip(cases(), served, strict=True))


EQUAL = [name for name in cases() if name not in ("sampled beside greedy", *UNDRAFTED)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("setting", [name for name in EQUAL if "abort" not in name])
def test_tokens_equal_plain_decoding(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None], setting: str, overlap: bool
) -> None:
    plain = answers(tiny_llama, False)[setting]
    drafted = answers(tiny_llama, True, overlap)[setting]
    assert drafted.tokens == plain.tokens
    assert drafted.reasons == plain.reasons
    proves_drafting(drafted)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("setting", ["logprobs", "logprobs and a penalty"])
def test_logprobs_equal_plain_decoding(tiny_llama: Path, setting: str, overlap: bool) -> None:
    plain = answers(tiny_llama, False)[setting]
    drafted = answers(tiny_llama, True, overlap)[setting]
    for mine, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert len(theirs) == 40
        assert mine == pytest.approx(theirs, abs=1e-3)
    for mine, theirs in zip(drafted.top_logprobs, plain.top_logprobs, strict=True):
        for best, expected in zip(mine, theirs, strict=True):
            assert best == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_requests_beside_sampled_ones(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None], overlap: bool
) -> None:
    plain = answers(tiny_llama, False)["sampled beside greedy"]
    drafted = answers(tiny_llama, True, overlap)["sampled beside greedy"]
    assert drafted.tokens[1::2] == plain.tokens[1::2]
    assert [len(tokens) for tokens in drafted.tokens] == [40] * 12
    proves_drafting(drafted)


@pytest.mark.parametrize("setting", UNDRAFTED)
def test_undrafted_requests_equal_plain_decoding(tiny_llama: Path, setting: str) -> None:
    drafted = answers(tiny_llama, True)[setting]
    assert drafted.tokens == answers(tiny_llama, False)[setting].tokens
    assert drafted.counters["drafted_steps"] == 0
    assert drafted.counters["steps"] == 12 * 39
    if setting == "a custom processor":
        assert all(token % 2 for tokens in drafted.tokens for token in tokens)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_touches_no_other_request(tiny_llama: Path, overlap: bool) -> None:
    name = "a request that is aborted"
    plain = answers(tiny_llama, False)["plain"].tokens
    drafted = answers(tiny_llama, True, overlap)[name]
    for row, tokens in enumerate(drafted.tokens):
        if row in cases()[name].abort_after:
            assert 0 < len(tokens) < 40
            assert tokens == plain[row][: len(tokens)]
        else:
            assert tokens == plain[row]
