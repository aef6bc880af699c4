"""What vLLM offers beside sampling, on the V2 model runner with Token Recycling and with Lyanna.

One engine of each serves all cases, so that each is served after the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lyanna_parts import drafter_for
from random_prompts import some_prompts
from tiny_models import add_byte_tokenizer, make_tiny_llama
from v2_on_cpu import LIMITS, check_runner, for_runner
from vllm_runs import DRAFTS, Answer, Case, run_vllm

from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
ENDING: dict[str, Any] = {"temperature": 0.6, "seed": 3, "max_tokens": 24}
PROMPTS = some_prompts(4)
LEAST = 11
METHODS: dict[str, dict[str, Any]] = {
    # Copies of the first answers would take the place of branches.
    "token_recycling": {"nodes": 7, "memory": 0},
    # A random drafter, which affects speed alone.
    "lyanna": {"nodes": 7, "head": "whole"},
}
CASES = {
    "greedy": Case(PROMPTS, GREEDY),
    "endings": Case(
        PROMPTS,
        [
            ENDING | {"stop_token_ids": [*range(300, 400)]},
            ENDING | {"min_tokens": LEAST, "stop_token_ids": [*range(2, 128)]},
            GREEDY | {"max_tokens": 24, "detokenize": True, "stop": ["a", "e", "5", "\x10"]},
            ENDING | {"n": 2, "stop_token_ids": [*range(100, 200)]},
        ],
    ),
    "logprobs": Case(PROMPTS, GREEDY | {"logprobs": 3, "prompt_logprobs": 1}),
    "forgotten": Case(PROMPTS, GREEDY, reset=True),
    "after sleep": Case(PROMPTS[:2], GREEDY, sleep=1),
    "after sleep and new weights": Case(PROMPTS, GREEDY, sleep=2, reload=True),
}
"""The cases, in the order in which they are served."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_byte_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("tokenized")))


def serve(
    model: Path, cases: dict[str, Case], speculative: dict[str, Any] | None = None, **engine: Any
) -> dict[str, Answer]:
    answers, log = run_vllm(
        model,
        [*cases.values()],
        speculative=speculative,
        environment=for_runner("v2"),
        skip_tokenizer_init=False,
        **LIMITS,
        **engine,
    )
    check_runner("v2", log)
    return dict(zip(cases, answers, strict=True))


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, Answer]:
    return serve(model, CASES)


@pytest.fixture(
    scope="module",
    params=[pytest.param("token_recycling", marks=pytest.mark.full), "lyanna"],
)
def drafted(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Answer]:
    speculative = {"method": request.param, **METHODS[request.param]}
    if request.param == "lyanna":
        folder = tmp_path_factory.mktemp("drafter")
        save(drafter_for(model), folder)
        speculative["model"] = str(folder)
    return serve(model, CASES, speculative)


@pytest.mark.full
def test_answers_equal_plain_decoding(plain: dict[str, Answer], drafted: dict[str, Answer]) -> None:
    for name, answer in drafted.items():
        assert answer.tokens == plain[name].tokens, name
        assert answer.reasons == plain[name].reasons, name
        assert answer.counters["draft_tokens"] > 0, name
    assert drafted["greedy"].counters["accepted_tokens"] > 0
    assert sum(each.counters["non_first_child_accepted"] for each in drafted.values()) > 0


@pytest.mark.full
def test_the_endings_are_what_they_are_called(plain: dict[str, Answer]) -> None:
    assert ["stop"] in plain["endings"].reasons[:1]
    assert ["stop"] in plain["endings"].reasons[2:3]
    assert LEAST <= len(plain["endings"].tokens[1][0]) < ENDING["max_tokens"]


@pytest.mark.full
def test_logprobs_are_those_of_plain_decoding(
    plain: dict[str, Answer], drafted: dict[str, Answer]
) -> None:
    mine, theirs = drafted["logprobs"], plain["logprobs"]
    for (positions,), (expected,) in zip(mine.logprobs, theirs.logprobs, strict=True):
        assert len(positions) == GREEDY["max_tokens"]
        for best, others in zip(positions, expected, strict=True):
            assert best == pytest.approx(others, abs=1e-3)
    for positions, expected in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
        for best, others in zip(positions[1:], expected[1:], strict=True):
            assert best == pytest.approx(others, abs=1e-3)


@pytest.mark.full
def test_what_was_learned_is_forgotten_with_the_weights(drafted: dict[str, Answer]) -> None:
    """A reset and new weights start drafting from nothing; sleep alone does not."""
    cold = drafted["greedy"].counters
    assert drafted["forgotten"].counters == cold
    assert drafted["after sleep and new weights"].counters == cold


@pytest.mark.full
def test_the_engines_metrics_count_the_drafts(drafted: dict[str, Answer]) -> None:
    """They leave out what a request does not use of its last step."""
    counts = [*drafted.values()][-1].engine_counts
    accepted = sum(each.counters["accepted_tokens"] for each in drafted.values())
    steps = sum(each.counters["steps"] for each in drafted.values())
    assert 0 < counts[f"{DRAFTS}accepted_tokens"] <= accepted
    assert 0 < counts[f"{DRAFTS}drafts"] <= steps
    assert counts[f"{DRAFTS}draft_tokens"] >= 7 * counts[f"{DRAFTS}drafts"]


@pytest.mark.full
@pytest.mark.parametrize("drafted", ["lyanna"], indirect=True)
def test_synchronous_scheduling_gives_lyannas_tokens_too(
    model: Path, drafted: dict[str, Answer], tmp_path: Path
) -> None:
    save(drafter_for(model), tmp_path)
    speculative = {"method": "lyanna", "model": str(tmp_path), **METHODS["lyanna"]}
    (answer,) = serve(
        model, {"greedy": CASES["greedy"]}, speculative, async_scheduling=False
    ).values()
    assert answer.tokens == drafted["greedy"].tokens
    assert answer.counters["accepted_tokens"] > 0
