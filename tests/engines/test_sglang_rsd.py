"""RSD in SGLang where requests and calls are for the target, and not for the draft model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_widened_model
import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_first_layers, make_tiny_llama

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture
def wide(tiny_llama: Path, tmp_path: Path) -> Path:
    """The target's first layer in a model whose hidden states are four times as wide."""
    first, wide = tmp_path / "first", tmp_path / "wide"
    make_first_layers(tiny_llama, first, 1)
    make_widened_model.main(first, wide, hidden=512, intermediate=256, heads=4, layers=1)
    return wide


def test_prompts_as_embeddings_beside_a_draft_model_of_another_width(
    tiny_llama: Path, wide: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    prompts = some_prompts(8, longest=40)
    embedded, given = (Case(prompts, GREEDY, embeds=folder) for folder in (tiny_llama, None))
    # SGLang rounds embeddings to bfloat16, in which nodes of a tree are rounded in another way than
    # plain tokens. So the answers are compared with those to the prompts' tokens.
    (from_embeddings, from_tokens), _ = run_sglang(
        tiny_llama,
        [embedded, given],
        {"tree": "beam:3x3"},
        method="rsd",
        draft_model=wide,
        dtype="bfloat16",
        disable_radix_cache=True,
    )
    assert from_embeddings.tokens == from_tokens.tokens
    proves_drafting(from_embeddings)


def test_updates_of_weights_leave_the_draft_model_alone(tiny_llama: Path, tmp_path: Path) -> None:
    """The draft model is the target itself, then another model, and the target again."""
    other = make_tiny_llama(tmp_path, seed=12)
    prompts = some_prompts(8)
    cases = [Case(prompts, GREEDY, weights=folder) for folder in (None, other, tiny_llama)]
    plain, _ = run_sglang(tiny_llama, cases, drafted=False)
    drafted, _ = run_sglang(
        tiny_llama, cases, {"tree": "beam:3x3"}, method="rsd", draft_model=tiny_llama
    )
    assert plain[0].tokens == plain[2].tokens != plain[1].tokens
    for without, answer in zip(plain, drafted, strict=True):
        assert answer.tokens == without.tokens
    alike, differing, again = (
        answer.counters["accepted_tokens"] / answer.counters["drafted_steps"] for answer in drafted
    )
    assert min(alike, again) > 2
    assert differing < 1
