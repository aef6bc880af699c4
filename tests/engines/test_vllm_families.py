"""Families of models beside Llama: tokens in vLLM with draft trees equal those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantised_models import quantise
from random_prompts import some_prompts
from tiny_families import FAMILIES, make_tiny_family
from vllm_runs import Answer, Case, run_vllm

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.5, "max_tokens": 32, "ignore_eos": True}

TREES = {"method": "token_recycling"}


@pytest.mark.parametrize(("bits", "dtype"), [(8, "float32"), (4, "bfloat16")])
def test_quantised_weights(
    bits: int,
    dtype: str,
    tiny_llama: Path,
    tmp_path: Path,
    proves_drafting: Callable[[Answer], None],
) -> None:
    equals_plain_decoding(quantise(tiny_llama, tmp_path, bits), proves_drafting, dtype=dtype)


def test_a_quantised_draft_model(tiny_llama: Path, tmp_path: Path) -> None:
    model = quantise(tiny_llama, tmp_path, 8)
    cases = [Case(some_prompts(8), GREEDY)]
    plain, _ = run_vllm(model, cases)
    drafted, _ = run_vllm(model, cases, {"method": "rsd", "model": str(model)})
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].counters["accepted_tokens"] > drafted[0].counters["steps"]


LONGER = ("mixtral", "heads_of_112", "wide_window", "gemma3")
"""Families that the full product tests, as others of their kind are tested always."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full) if name in LONGER else name for name in FAMILIES],
)
def test_tokens_are_those_of_plain_decoding(
    family: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    equals_plain_decoding(make_tiny_family(family, tmp_path), proves_drafting)


def equals_plain_decoding(
    model: Path, proves_drafting: Callable[[Answer], None], **engine: Any
) -> None:
    cases = [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(4, seed=4), GREEDY, together=False),
        Case(some_prompts(8, seed=5), [SEEDED | {"seed": seed} for seed in range(8)]),
    ]
    plain, _ = run_vllm(model, cases, **engine)
    drafted, _ = run_vllm(model, cases, TREES, **engine)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
