"""Models beside plain Llamas: greedy tokens in SGLang with draft trees equal those without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_families import make_tiny_family

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}

FAMILIES = {
    "qwen3_moe": "a mixture of experts",
    "gemma2": "windows of 32 tokens, and soft caps, which SGLang omits on a CPU",
    "gemma3": "windows of 32 tokens",
    "mistral": "a window that SGLang ignores",
}
LONGER = ("gemma3", "mistral")
"""Families that the full product tests."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full) if name in LONGER else name for name in FAMILIES],
)
def test_tokens_are_those_of_plain_decoding(
    family: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    if family == "gemma3":
        model = make_tiny_family(family, tmp_path, embedding=2.0)
        # SGLang loads no head of this family, but takes the embedding in its place.
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    else:
        model = make_tiny_family(family, tmp_path)
    equals_plain_decoding(model, proves_drafting)


def equals_plain_decoding(
    model: Path, proves_drafting: Callable[[Answer], None], **engine: Any
) -> None:
    cases = [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(4, seed=4), GREEDY, together=False),
    ]
    plain, _ = run_sglang(model, cases, drafted=False, **engine)
    drafted, _ = run_sglang(model, cases, **engine)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
