"""RSD in SGLang where requests and calls are for the target, and not for the draft model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hot_drafts
import make_widened_model
import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_models import add_byte_tokenizer, make_first_layers, make_tiny_llama

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture
def wide(tiny_llama: Path, tmp_path: Path) -> Path:
    """The target's first layer in a model whose hidden states are four times as wide."""
    first, wide = tmp_path / "first", tmp_path / "wide"
    make_first_layers(tiny_llama, first, 1)
    make_widened_model.main(first, wide, hidden=512, intermediate=256, heads=4, layers=1)
    return wide


@pytest.mark.full
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


@pytest.fixture
def with_learned_positions(tmp_path: Path) -> Path:
    """A tiny random GPT-2, which has an embedding for each of 128 positions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(11)
    shape = {"vocab_size": 512, "n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=1))
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.full
def test_texts_reach_the_end_of_a_context_of_learned_positions(
    with_learned_positions: Path,
) -> None:
    """The deepest nodes would lie beyond the last position."""
    prompts = some_prompts(4, shortest=90, longest=120)
    left = [GREEDY | {"max_new_tokens": 128 - len(prompt)} for prompt in prompts]
    model, case = with_learned_positions, Case(prompts, left)
    (plain,), _ = run_sglang(model, [case], drafted=False, context_length=128)
    (drafted,), _ = run_sglang(
        model, [case], {"tree": "beam:2x6"}, method="rsd", draft_model=model, context_length=128
    )
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 20


def test_prompts_are_scored_by_the_target_alone(
    tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The draft model computes logits of frequent tokens, and none of prompts."""
    model = add_byte_tokenizer(make_tiny_llama(tmp_path / "target"))
    draft = make_first_layers(model, tmp_path / "draft", 1)
    case = Case(some_prompts(6), GREEDY, logprobs=1, scored=True)
    (plain,), _ = run_sglang(model, [case], drafted=False)
    options = {"tree": "beam:3x3", "head": 400}
    (drafted,), log = run_sglang(
        *(model, [case], options),
        method="rsd",
        draft_model=draft,
        variables=hot_drafts.ENVIRONMENT,
    )
    assert "RSD drafts the 400 most frequent of 512 tokens" in log
    hot_drafts.check_drafts(log, [1, 3, 3])
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    for mine, theirs, prompt in zip(drafted.scores, plain.scores, case.prompts, strict=True):
        assert len(mine) == len(prompt) - 1
        assert mine == pytest.approx(theirs, abs=1e-3)


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
