"""Families of models beside Llama: greedy tokens in SGLang with draft trees equal those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_tiny_mixture

SETTINGS = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}


def test_a_mixture_of_experts(tmp_path: Path, proves_drafting: Callable[[Answer], None]) -> None:
    cases = [
        Case(some_prompts(8), SETTINGS),
        Case(some_prompts(4, seed=4), SETTINGS, together=False),
    ]
    model = make_tiny_mixture(tmp_path)
    plain, _ = run_sglang(model, cases, drafted=False)
    drafted, _ = run_sglang(model, cases)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
