"""Answers that a grammar binds follow plain decoding's distribution, by comparison with the exact
one, which is computed from the target by enumeration."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from joint_distribution import Joint, bound_joint, p_value
from structured_answers import CHOICES, make_model, tokens_of
from vllm_runs import Answer, Case, run_vllm

pytestmark = pytest.mark.full

PROMPT = [5, 9, 30]
END = 1
REQUESTS = 2_000

SAMPLED: dict[str, Any] = {"temperature": 1.0}
LETTERS = SAMPLED | {"max_tokens": 4, "structured": {"regex": "[a-d][ab][a-d]{3}"}}
"""What may follow the first letter may follow the later ones too: the masks of roots alone would
leave the answers what the grammar allows."""
WORDS = SAMPLED | {"max_tokens": 20, "structured": {"choice": CHOICES}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def letters(model: Path) -> Joint:
    """The distribution of answers to `LETTERS`."""
    texts = ["".join(each) for each in product("abcd", "ab", "abcd", "abcd")]
    return bound_joint(model, PROMPT, map(tokens_of, texts))


@pytest.fixture(scope="module")
def words(model: Path) -> Joint:
    """The distribution of answers to `WORDS`."""
    return bound_joint(model, PROMPT, [[*tokens_of(text), END] for text in CHOICES])


def serve(model: Path, **more: Any) -> list[Answer]:
    """Answers to both grammars, without seeds of their own, so drawn from the engine's."""
    answers, _ = run_vllm(
        model,
        [Case([PROMPT] * REQUESTS, each) for each in (LETTERS, WORDS)],
        {"method": "token_recycling", "nodes": 7, "memory": 0},
        timeout=900,
        skip_tokenizer_init=False,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=64,
        structured_outputs_config={"backend": "xgrammar"},
        **more,
    )
    return answers


def texts_of(answer: Answer) -> list[list[int]]:
    return [tokens for (tokens,) in answer.tokens]


def test_samples_follow_the_distribution(model: Path, letters: Joint, words: Joint) -> None:
    answers = serve(model)
    for answer, joint in zip(answers, (letters, words), strict=True):
        assert p_value(texts_of(answer), joint) > 0.001
        assert answer.counters["accepted_tokens"] > 0
    assert answers[0].counters["non_first_child_accepted"] > 0
    assert len([share for share in letters.values() if share * REQUESTS >= 5]) > 20


def test_the_masks_of_roots_are_found(model: Path, letters: Joint) -> None:
    """Negative control: each node gets the mask of its root, and answers still have their form."""
    answers = serve(model, planted_fault="root's grammar")
    assert answers[0].counters["accepted_tokens"] > 0
    assert p_value(texts_of(answers[0]), letters) < 1e-6
