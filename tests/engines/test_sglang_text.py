"""Sampling parameters that need a tokenizer: stop strings, minimum lengths and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sglang_runs import Answer, Case, run_sglang

TEXTS = (
    "The capital of France is",
    "List the numbers from one to ten: one, two, three,",
    "Question: What is 2 + 2?\nAnswer:",
    "Once upon a time there was",
)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
}
SETTINGS: dict[str, dict[str, Any] | list[dict[str, Any]]] = {
    "stop strings": {**GREEDY, "stop": [".", " five"]},
    "minimum length": {**GREEDY, "min_new_tokens": 20},
    "regular expression": {**GREEDY, "regex": r"(yes|no), [a-z]{3,9}\."},
    "JSON schema": {**GREEDY, "max_new_tokens": 60, "json_schema": json.dumps(SCHEMA)},
    "a grammar beside none": [
        {**GREEDY, "regex": r"[a-z]{3,9}\."} if row % 2 else GREEDY for row in range(len(TEXTS))
    ],
}


@cache
def answers(model: Path, drafted: bool) -> tuple[dict[str, Answer], str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    served, log = run_sglang(
        model,
        [Case(prompts, setting, rounds=2) for setting in SETTINGS.values()],
        # Copies of the answers to another case would take the place of branches.
        {"memory": 0},
        drafted=drafted,
        skip_tokenizer_init=False,
        grammar_backend="xgrammar",
        constrained_json_disable_any_whitespace=True,
    )
    return dict(zip(SETTINGS, served, strict=True)), log


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_equal_plain_decoding(
    smollm2: Path, proves_drafting: Callable[[Answer], None], setting: str
) -> None:
    plain = answers(smollm2, False)[0][setting]
    drafted = answers(smollm2, True)[0][setting]
    assert drafted.texts == plain.texts
    assert drafted.tokens == plain.tokens
    assert drafted.reasons == plain.reasons
    if setting in ("regular expression", "JSON schema"):  # which seldom leave two likely tokens
        assert drafted.counters["accepted_tokens"] > drafted.counters["drafted_steps"] / 2
    else:
        proves_drafting(drafted)


def test_grammars_hold(smollm2: Path) -> None:
    served, log = answers(smollm2, True)
    for text in served["regular expression"].texts:
        assert re.fullmatch(r"(yes|no), [a-z]{3,9}\.", text or "")
    for text in served["JSON schema"].texts:
        assert set(json.loads(text or "")) == {"city", "large"}
    assert "are served without drafts" not in log
