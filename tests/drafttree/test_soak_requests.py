"""What a soak calls wrong, and what it does not."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import pytest
from soak_requests import END, STOPS, Asked, Given, Served, first_stop, make_requests, why_wrong
from structured_answers import check_form, names, text_of, tokens_of

WHOLE = Served(0, 0, None, True, False)
ABORTED = Served(0, 0, 3, True, True)
OTHER = 300
"""A token that ends nothing."""


def ask(exact: bool = False, grammar: str | None = None, **sampling: Any) -> Asked:
    return Asked(0, [5, 6], {"temperature": 1.0, "max_tokens": 8} | sampling, grammar, exact)


def answer(tokens: list[int], reason: str | None, logprobs: list[float] | None = None) -> Given:
    return Given([tokens], ["text"], [reason], [] if logprobs is None else [logprobs])


def wrong(asked: Asked, found: Given, served: Served = WHOLE) -> str:
    return why_wrong(asked, served, found, found) or ""


LETTER = dict(zip("kqez", tokens_of("kqez"), strict=True))


@pytest.mark.parametrize(
    ("asked", "tokens", "reason"),
    [
        (ask(), [OTHER] * 8, "length"),
        (ask(), [OTHER, END], "stop"),
        (ask(), [OTHER] * 7 + [END], "stop"),
        (ask(ignore_eos=True), [END] * 8, "length"),
        (ask(stop_token_ids=[7]), [OTHER, 7], "stop"),
        (ask(stop=["qe", "z"]), [LETTER["q"], LETTER["q"], LETTER["e"]], "stop"),
        (ask(stop=["<unused4", "z"]), [OTHER, 410], "stop"),
        (ask(stop=["31", "z"]), [OTHER, 331], "stop"),
        (ask(min_tokens=4, stop_token_ids=[7]), [OTHER] * 4 + [7], "stop"),
        (ask(grammar="choices"), [*tokens_of("green"), END], "stop"),
    ],
)
def test_answers_that_end_as_was_asked_for(asked: Asked, tokens: list[int], reason: str) -> None:
    assert wrong(asked, answer(tokens, reason)) == ""


@pytest.mark.parametrize(
    ("asked", "tokens", "reason", "why"),
    [
        (ask(), [OTHER] * 3, "length", "for its length after 3 tokens of 8"),
        (ask(), [], "length", "for its length after 0 tokens"),
        (ask(), [OTHER] * 9, "length", "9 tokens are too many"),
        (ask(), [OTHER] * 3, "abort", "for the reason abort"),
        (ask(), [OTHER] * 3, "stop", "without a cause"),
        (ask(ignore_eos=True), [OTHER, END], "stop", "without a cause"),
        (ask(), [END] * 8, "length", "after the stop at token 0"),
        (ask(), [OTHER] * 7 + [END], "length", "after the stop at token 7"),
        (ask(stop_token_ids=[7]), [7, OTHER, 7], "stop", "after the stop at token 0"),
        (ask(stop=["qe", "z"]), [LETTER["z"], OTHER, LETTER["z"]], "stop", "stop at token 0"),
        (ask(stop=["qe", "z"]), [*tokens_of("qe"), *[OTHER] * 6], "length", "stop at token 1"),
        (ask(min_tokens=4, stop_token_ids=[7]), [OTHER, 7], "stop", "2 tokens, which are too few"),
        (ask(grammar="choices"), [*tokens_of("gree"), END], "stop", "the form of its grammar"),
        (ask(grammar="choices"), [OTHER, END], "stop", "the form of its grammar"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_wrong_ends(asked: Asked, tokens: list[int], reason: str, why: str, exact: bool) -> None:
    asked = ask(exact, asked.grammar, **asked.sampling)
    assert why in wrong(asked, answer(tokens, reason))


def test_an_aborted_answer_may_end_anywhere() -> None:
    assert wrong(ask(), answer([OTHER] * 3, None), ABORTED) == ""
    assert "went on" in wrong(ask(), answer([END, OTHER, END], "stop"), ABORTED)
    assert wrong(ask(), Given(), ABORTED) == "there is no answer"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("logprobs", "why"),
    [(None, "no logprobs"), ([0.0], "1 logprobs of 8 tokens"), ([0.0] * 9, "9 logprobs of 8")],
)
def test_each_token_has_its_logprob(exact: bool, logprobs: list[float] | None, why: str) -> None:
    asked = ask(exact, logprobs=2)
    expected = answer([OTHER] * 8, "length", [0.0] * 8)
    assert why_wrong(asked, WHOLE, expected, expected) is None
    found = answer([OTHER] * 8, "length", logprobs)
    assert why in (why_wrong(asked, WHOLE, expected, found) or "")


def test_logprobs_of_an_exact_answer_are_those_of_plain_decoding() -> None:
    expected = answer([OTHER] * 8, "length", [-1.0] * 8)
    for other in (-1.1, nan):
        found = answer([OTHER] * 8, "length", [-1.0] * 7 + [other])
        asked = ask(True, logprobs=2)
        assert "logprobs differ" in (why_wrong(asked, WHOLE, expected, found) or "")


def test_an_answer_that_cannot_be_judged_is_wrong() -> None:
    plain = answer([OTHER] * 8, "length")
    twice = Given(plain.tokens * 2, plain.texts * 2, plain.reasons * 2)
    assert why_wrong(ask(True), WHOLE, plain, twice) == "there are 2 samples"
    without_reasons = Given(plain.tokens, plain.texts, [])
    found = why_wrong(ask(True), WHOLE, plain, without_reasons) or ""
    assert found.startswith("it cannot be judged: IndexError")


def test_prompts_with_stop_strings_end_with_a_whole_character() -> None:
    prompts = [
        each.prompt for each in make_requests("vllm", 0, 300, "rsd") if "stop" in each.sampling
    ]
    assert prompts
    assert not any(text_of(prompt).endswith("\ufffd") for prompt in prompts)


def test_every_stop_string_of_the_pool_is_found() -> None:
    for stop in STOPS:
        ends = [first_stop({"stop": [stop]}, [LETTER["q"], token]) for token in names()]
        assert 1 in ends, stop


GOOD = {"city": "Oslo", "days": [True, False], "note": "abc"}


@pytest.mark.parametrize(
    "change",
    [
        {"city": "Paris"},
        {"city": 1},
        {"days": [True]},
        {"days": [True] * 4},
        {"days": ["no", True]},
        {"days": {}},
        {"note": "x"},
        {"note": 1},
        {"more": 1},
    ],
)
def test_schemas_are_checked(change: dict[str, Any]) -> None:
    check_form("a schema", json.dumps(GOOD))
    check_form("a tag", f"<call>{json.dumps(GOOD)}</call>")
    changed = json.dumps(GOOD | change)
    for kind, text in (("a schema", changed), ("a tag", f"<call>{changed}</call>")):
        with pytest.raises(AssertionError):
            check_form(kind, text)


@pytest.mark.parametrize("text", ["[]", "{}", '"Oslo"'])
def test_other_values_do_not_have_the_form_of_a_schema(text: str) -> None:
    with pytest.raises(AssertionError):
        check_form("a schema", text)


def test_a_tag_has_both_its_ends() -> None:
    for text in (json.dumps(GOOD), f"<call>{json.dumps(GOOD)}", f"{json.dumps(GOOD)}</call>"):
        with pytest.raises(AssertionError):
            check_form("a tag", text)
