"""Models beside plain Llamas: greedy tokens in SGLang with draft trees equal those without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import int8_on_cpu
import pytest
from lyanna_parts import drafter_for
from quantised_models import quantise
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_families import make_tiny_family

from drafttree.quantization import quantize
from lyanna_plugin.checkpoint import save

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


def test_quantised_weights(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    model = quantise(tiny_llama, tmp_path, "int8")
    equals_plain_decoding(model, proves_drafting, variables=int8_on_cpu.ENVIRONMENT)


@pytest.mark.full
@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_quantised_weights_of_target_and_draft_model(
    method: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """RSD's draft model is rounded like the target. Lyanna's layer has its embeddings and head."""
    (tmp_path / "target").mkdir()
    model = quantise(tiny_llama, tmp_path / "target", "int8")
    draft, options = tmp_path / "draft", {}
    if method == "lyanna":
        options = {"nodes": 12}
        save(drafter_for(model), draft)
    else:
        quantize(tiny_llama, draft, report=lambda line: None)
    cases = [Case(some_prompts(12), GREEDY)]
    (plain,), _ = run_sglang(model, cases, drafted=False, variables=int8_on_cpu.ENVIRONMENT)
    (drafted,), _ = run_sglang(
        model, cases, options, method=method, draft_model=draft, variables=int8_on_cpu.ENVIRONMENT
    )
    assert drafted.tokens == plain.tokens
    accepted, steps = (drafted.counters[name] for name in ("accepted_tokens", "steps"))
    assert accepted > (steps if method == "rsd" else 0)


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
