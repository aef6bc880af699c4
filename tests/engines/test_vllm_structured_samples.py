"""Answers that a grammar binds follow plain decoding's distribution, by comparison with the exact
one, which is computed from the target by enumeration."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from joint_distribution import Joint, bound_joint, p_value
from structured_answers import CHOICES, make_model, tokens_of
from v2_on_cpu import check_runner, for_runner
from vllm_runs import Answer, Case, run_vllm

pytestmark = pytest.mark.full

PROMPT = tokens_of("abcdacbdbadcaabbccddbcab")
"""It holds most pairs of letters, so letters are drafted after each."""
END = 1
REQUESTS = {"v1": 2_000, "v2": 800}
"""By model runner: in Triton's interpreter steps take long."""

SAMPLED: dict[str, Any] = {"temperature": 1.0}
LETTERS = SAMPLED | {"max_tokens": 4, "structured": {"regex": "[a-d][ab][a-c][a-d]{2}"}}
"""What may follow a letter may follow the next one too: the masks of roots alone would leave the
answers what the grammar allows."""
WORDS = SAMPLED | {"max_tokens": 20, "structured": {"choice": CHOICES}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def letters(model: Path) -> Joint:
    """The distribution of answers to `LETTERS`."""
    texts = ["".join(each) for each in product("abcd", "ab", "abc", "abcd")]
    return bound_joint(model, PROMPT, map(tokens_of, texts))


@pytest.fixture(scope="module")
def words(model: Path) -> Joint:
    """The distribution of answers to `WORDS`."""
    return bound_joint(model, PROMPT, [[*tokens_of(text), END] for text in CHOICES])


def serve(model: Path, runner: str, *sampling: dict[str, Any], **more: Any) -> list[Answer]:
    """Answers to requests without seeds of their own, so drawn from the engine's."""
    answers, log = run_vllm(
        model,
        [Case([PROMPT] * REQUESTS[runner], each) for each in sampling],
        {"method": "token_recycling", "nodes": 7, "memory": 0},
        timeout=1800,
        environment=for_runner(runner),
        skip_tokenizer_init=False,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=64,
        structured_outputs_config={"backend": "xgrammar"},
        **more,
    )
    check_runner(runner, log)
    return answers


def texts_of(answer: Answer) -> list[list[int]]:
    return [tokens for (tokens,) in answer.tokens]


def test_samples_follow_the_distribution(model: Path, letters: Joint, words: Joint) -> None:
    answers = serve(model, "v1", LETTERS, WORDS)
    for answer, joint in zip(answers, (letters, words), strict=True):
        assert p_value(texts_of(answer), joint) > 0.001
        assert answer.counters["accepted_tokens"] > 0
    assert answers[0].counters["non_first_child_accepted"] > 0
    assert len([share for share in letters.values() if share * REQUESTS["v1"] >= 5]) > 20


def test_samples_follow_the_distribution_on_v2(model: Path, letters: Joint) -> None:
    """The masks of trees that the scheduler learns of within the step."""
    (answer,) = serve(model, "v2", LETTERS)
    assert p_value(texts_of(answer), letters) > 0.001
    assert answer.counters["accepted_tokens"] > 0
    assert answer.counters["non_first_child_accepted"] > 0


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_masks_of_roots_are_found(runner: str, model: Path, letters: Joint) -> None:
    """Negative control: each node gets the mask of its root, and answers still have their form."""
    (answer,) = serve(model, runner, LETTERS, planted_fault="root's grammar")
    assert answer.counters["accepted_tokens"] > 0
    assert p_value(texts_of(answer), letters) < 1e-6
