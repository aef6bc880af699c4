"""Sessions of vLLM, whose prompts come one after another, and whose answers end at stop tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import steady_steps
from drafted_chains import VLLM_ENGINE
from overfitted_drafter import PROMPTS, make_overfitted
from random_prompts import some_prompts
from structured_answers import make_model, tokens_of
from vllm_sessions import Sessions, Turn, run_sessions

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
FIRST, SECOND = some_prompts(2, seed=3, longest=40)


@pytest.mark.parametrize("method", ["token_recycling", pytest.param("rsd", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("runner", "limits"),
    [
        pytest.param("v1", {}, id="v1"),
        pytest.param("v2", {"async_scheduling": False}, id="v2", marks=pytest.mark.full),
        pytest.param("v2", {}, id="v2-async", marks=pytest.mark.full),
    ],
)
def test_a_turn_after_a_stop_token(
    runner: str, limits: dict[str, Any], method: str, tiny_llama: Path
) -> None:
    """A stop token may be a draft, and be accepted with drafts behind it, which are dropped.

    The same session comes again, as Token Recycling then copies the first one's answers.
    """
    probe = run_sessions(tiny_llama, [[(FIRST, GREEDY)]], None, runner, **limits)
    answer = probe.tokens[0][0]
    # With RSD the second step emits tokens 6 to 10, all of them drafts except the last.
    stop = next(token for at, token in enumerate(answer[6:9], 6) if token not in answer[:at])
    turns: list[Turn] = [
        (FIRST, GREEDY | {"stop_token_ids": [stop]}),
        (SECOND, GREEDY),
        (SECOND, GREEDY),
    ]
    plain = run_sessions(tiny_llama, [turns] * 3, None, runner, **limits)
    assert plain.tokens[0][0][-1] == stop
    options: dict[str, dict[str, Any]] = {
        "token_recycling": {"nodes": 15},
        "rsd": {"model": str(tiny_llama), "tree": "beam:1x4"},
    }
    speculative = {"method": method, **options[method]}
    drafted = run_sessions(tiny_llama, [turns] * 3, speculative, runner, **limits)
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 20


@pytest.mark.full
def test_a_turn_after_one_that_opted_out_is_drafted_for(tiny_llama: Path) -> None:
    """V2's scheduler has learnt that the session had no drafts, and no other request runs."""
    off = GREEDY | {"max_tokens": 64, "extra_args": {"drafttree": False}}
    turns: list[Turn] = [(FIRST, off), (SECOND, GREEDY | {"max_tokens": 64})]
    plain = run_sessions(tiny_llama, [turns], None, "v2")
    speculative = {"method": "rsd", "model": str(tiny_llama), "tree": "auto"}
    drafted = run_sessions(tiny_llama, [turns], speculative, "v2", steady_steps.environment(1e-6))
    assert drafted.tokens == plain.tokens
    # Nearly all of the second turn's tokens are drafts.
    assert drafted.counters["accepted_tokens"] > 32


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_next"])
def test_models_that_are_drafted_for_in_chains(
    family: str, without_trees: Callable[[str], Path]
) -> None:
    """The state of recurrent layers after a step with drafts is not that of the turn's end.

    The sessions come again, so that all of their answers would be copied. vLLM rounds otherwise in
    an engine that may draft, so requests that opt out stand for plain decoding.
    """
    model = without_trees(family)
    method, engine = {"method": "token_recycling"}, VLLM_ENGINE[family]

    def run(sampling: dict[str, Any]) -> Sessions:
        # vLLM appends to prompts.
        turns: list[list[Turn]] = [
            [([*prompt], sampling) for prompt in (FIRST, SECOND, FIRST)] for _ in range(3)
        ]
        return run_sessions(model, turns, method, **engine)

    plain = run(GREEDY | {"extra_args": {"drafttree": False}})
    drafted = run(GREEDY)
    assert plain.counters["draft_tokens"] == 0
    assert drafted.tokens == plain.tokens
    if family == "qwen3_next":
        assert drafted.counters["draft_tokens"] == 0
    else:
        assert drafted.counters["accepted_tokens"] > 20


@pytest.mark.full
@pytest.mark.parametrize("method", ["token_recycling", "lyanna"])
def test_a_seed_after_a_stop_token(method: str, tiny_llama: Path, tmp_path: Path) -> None:
    """The next turn goes on with the random numbers that follow those of the answer's tokens.

    A stop token that is an accepted draft takes no more of them than one that is not. Sessions with
    the same stop tokens come again, as Token Recycling then copies the first ones' answers.
    """
    seeded: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 7}
    probe = run_sessions(tiny_llama, [[(PROMPTS[0], GREEDY)]])
    answer = probe.tokens[0][0]
    stops = [token for at, token in enumerate(answer) if at > 3 and token not in answer[:at]][:4]
    assert len(stops) == 4
    sessions: list[list[Turn]] = [
        # Each token takes random numbers, though it is the greedy one. vLLM appends to prompts.
        [
            ([*PROMPTS[0]], seeded | {"top_k": 1, "stop_token_ids": [stop]}),
            ([*SECOND], seeded),
        ]
        for stop in stops * 2
    ]
    plain = run_sessions(tiny_llama, sessions)
    assert [turns[0][-1] for turns in plain.tokens] == stops * 2
    assert len({*map(tuple, (turns[1] for turns in plain.tokens))}) == len(stops)
    speculative: dict[str, Any] = {"method": method, "nodes": 15}
    if method == "lyanna":
        make_overfitted(tiny_llama, tmp_path)
        speculative["model"] = str(tmp_path)
    drafted = run_sessions(tiny_llama, sessions, speculative)
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 10


BOUND: dict[str, Any] = {"structured": {"regex": "[a-d]{300}"}}
"""A grammar that no session comes to the end of."""


@pytest.mark.full
@pytest.mark.parametrize("method", ["token_recycling", pytest.param("rsd", marks=pytest.mark.full)])
def test_the_grammar_of_the_first_turn_binds_them_all(method: str, tmp_path: Path) -> None:
    """vLLM heeds no other: later turns are as free, or as bound, as the first one.

    The sessions come again, as Token Recycling then copies what the first ones said.
    """
    model = make_model(tmp_path)
    # Its statistics have no room for more drafts than `nodes`.
    engine: dict[str, Any] = {"skip_tokenizer_init": False, "disable_log_stats": False}
    settings = [GREEDY, GREEDY | BOUND]
    turns: list[list[Turn]] = [
        [(FIRST, free), (SECOND, bound), (SECOND, free)]
        for free, bound in (settings, settings[::-1])
    ]
    plain = run_sessions(model, turns * 3, **engine)
    letters = {*tokens_of("abcd")}
    free_session, bound_session = ({*chain(*session)} for session in plain.tokens[:2])
    assert bound_session <= letters
    assert not free_session <= letters
    options: dict[str, dict[str, Any]] = {
        "token_recycling": {"nodes": 15},
        "rsd": {"model": str(model), "tree": "beam:1x4"},
    }
    speculative = {"method": method, **options[method]}
    drafted = run_sessions(model, turns * 3, speculative, **engine)
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 100
