"""In SGLang a step's tokens end a request where plain decoding would, whichever stops they have."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_runs import Case, run_sglang

EOS, OTHER_END = 0, 7
LETTERS = "#abcdef!"


class Letters:
    """A tokenizer of letters."""

    eos_token_id, additional_stop_token_ids = EOS, None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [*map(LETTERS.index, text)]

    def decode(self, tokens: Any) -> str:
        return "".join(LETTERS[token] for token in tokens)


@pytest.fixture
def make_request(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes requests of the real SGLang, as of a server with a method; `served` names another."""
    from sglang.srt import runtime_context
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from drafttree.sglang.patches import check_stops_in_order
    from drafttree.sglang.plugin import register

    register()
    algorithm = SimpleNamespace(speculative_algorithm="TOKEN-RECYCLING")
    monkeypatch.setattr(runtime_context, "get_spec", lambda: algorithm)
    monkeypatch.setattr(Req, "update_finish_state", Req.update_finish_state)
    check_stops_in_order()

    def make(served: str | None = "TOKEN-RECYCLING", **sampling: Any) -> Any:
        algorithm.speculative_algorithm = served
        parameters = SamplingParams(**{"max_new_tokens": 40, **sampling})
        parameters.normalize(Letters())
        made = Req("name", "", array("q", [1]), parameters, vocab_size=8, eos_token_ids={EOS})
        made.tokenizer = Letters()
        return made

    return make


def end_of(request: Any, *runs: list[int]) -> tuple[str, Any]:
    """What a request emits of runs of accepted tokens, and why it ended."""
    for run in runs:
        request.output_ids.extend(run)
        request.update_finish_state(len(run))
        if request.finished():
            break
    reason = request.finished_reason and request.finished_reason.to_json()
    return Letters().decode(request.output_ids_through_stop), reason


@pytest.mark.parametrize(
    ("stops", "run", "end", "matched"),
    [
        ({"stop": ["cd", "b"]}, "abcdf", "ab", "b"),
        ({"stop": ["cd"]}, "ab#cd", "ab#", EOS),
        ({"stop": ["cd"], "ignore_eos": True}, "ab#cd", "ab#cd", "cd"),
        ({"stop": ["cd"], "stop_token_ids": [OTHER_END]}, "a!cd", "a!", OTHER_END),
        ({"stop": ["cd"], "stop_regex": ["b+"]}, "abcd", "ab", "b+"),
        ({"stop": ["cd"], "max_new_tokens": 3}, "abfcd", "abf", None),
        ({"stop": ["cd"], "max_new_tokens": 3}, "acdcd", "acd", "cd"),
    ],
    ids=str,
)
def test_a_run_ends_at_the_first_of_its_stops(
    make_request: Callable[..., Any], stops: dict[str, Any], run: str, end: str, matched: Any
) -> None:
    request, tokens = make_request(**stops), Letters().encode(run)
    text, reason = end_of(request, tokens)
    assert (text, reason.get("matched")) == (end, matched)
    assert request.output_ids.tolist() == tokens  # as SGLang has them, for what it counts and frees


def test_any_run_ends_as_its_tokens_one_by_one(make_request: Callable[..., Any]) -> None:
    draw = random.Random(5)
    ended = 0
    for _ in range(300):
        sampling: dict[str, Any] = {
            "stop": ["".join(draw.choices("abcdef", k=draw.randint(1, 3))) for _ in range(3)],
            "stop_regex": draw.choice([None, ["[ab]c$", "f+e"]]),
            "ignore_eos": draw.random() < 0.3,
            "max_new_tokens": draw.randint(4, 40),
        }
        runs = [draw.choices(range(8), k=draw.randint(1, 8)) for _ in range(8)]
        one_by_one = end_of(
            make_request(None, **sampling), *([token] for run in runs for token in run)
        )
        assert end_of(make_request(**sampling), *runs) == one_by_one
        ended += one_by_one[1] is not None
    assert ended > 200


def test_a_grammar_ends_a_request_with_its_last_token(make_request: Callable[..., Any]) -> None:
    """SGLang has its grammar read all tokens of a step before it looks for their end."""
    for stop, end in (("f", "abc"), ("b", "ab")):
        request = make_request(stop=[stop])
        request.grammar = grammar = SimpleNamespace(is_terminated=lambda: True)
        assert end_of(request, Letters().encode("abc"))[0] == end
        assert request.grammar is grammar


def test_an_abort_keeps_what_was_accepted(make_request: Callable[..., Any]) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request = make_request(stop=["b"])
    request.to_finish = FINISH_ABORT("aborted")
    text, reason = end_of(request, Letters().encode("abc"))
    assert (text, reason["type"]) == ("abc", "abort")


def test_other_methods_are_checked_as_before(make_request: Callable[..., Any]) -> None:
    run = Letters().encode("abcdf")
    assert end_of(make_request("EAGLE", stop=["cd", "b"]), run)[0] == "abcd"


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24}
QUESTIONS = "".join(
    f"Question: What is {first} + 2?\nAnswer: {first + 2}\n" for first in (3, 5, 1, 4)
)
TURN = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\nParis.<|im_end|>\n"
)
TEXTS = {
    f"{QUESTIONS}Question: What is 2 + 2?\nAnswer:": {"stop": ["Question:", "\n"]},
    TURN * 3 + TURN.partition("Paris")[0]: {"stop": ["system"]},
}
"""In both texts, plain decoding ends before the first of the stop strings."""


def test_texts_that_are_copied_end_where_plain_decoding_ends_them(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    stops = [GREEDY | stop for stop in TEXTS.values()]
    beyond = Case(prompts, GREEDY | {"ignore_eos": True})  # answers to copy
    ended = [
        Case(prompts, stops),
        Case(prompts, stops, stream=True),
        Case(prompts, stops, logprobs=1),
    ]
    settings: dict[str, Any] = {"skip_tokenizer_init": False}
    (longer, *plain), _ = run_sglang(smollm2, [beyond, *ended], drafted=False, **settings)
    (_, *drafted), _ = run_sglang(smollm2, [beyond, *ended], **settings)
    for text, stop in zip(longer.texts, TEXTS.values(), strict=True):
        assert stop["stop"][0] in (text or "")
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.texts == without.texts
        assert with_trees.tokens == without.tokens
        assert with_trees.reasons == without.reasons == ["stop", "stop"]
        assert [*map(len, with_trees.logprobs)] == [*map(len, without.logprobs)]
        # More than the answers have: also what came after their ends was accepted.
        assert with_trees.counters["accepted_tokens"] > sum(map(len, without.tokens))
