"""Which tokens RSD drafts, and how their logits are computed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_models import add_byte_tokenizer
from torch.nn.functional import linear

from drafttree.target import Target
from rsd_plugin import METHOD, RsdDrafter

VOCAB, SIZE = 512, 48
MERGES = [("a", "b"), ("ab", "c"), ("x", "y"), ("xy", "z")]
HOT = [*range(258), *range(508, 512)]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    add_byte_tokenizer(tmp_path, VOCAB, merges=MERGES)
    return Target(
        model="target",
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        dtype=torch.float32,
        logger=logging.getLogger("test"),
        folder=tmp_path,
    )


def drafter_for(target: Target, **options: Any) -> RsdDrafter:
    options = {"model": "draft", "tree": "beam:2x2", **options}
    drafter = METHOD.drafter(METHOD.parse(options), target)
    assert isinstance(drafter, RsdDrafter)
    return drafter


def head(states: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return linear(states, torch.randn(VOCAB, SIZE, generator=generator).to(states.dtype))


def is_whole(drafter: RsdDrafter) -> bool:
    drafter.read_head(head, SIZE, torch.float32)
    states = torch.randn(3, SIZE)
    return torch.equal(drafter.logits(states, head), head(states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequent_tokens_alone_have_logits(
    target: Target, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = drafter_for(target, head=262)
    with caplog.at_level(logging.INFO, "test"):
        drafter.read_head(head, SIZE, dtype)
    assert "RSD drafts the 262 most frequent of 512 tokens" in caplog.text
    states = torch.randn(5, SIZE).to(dtype)
    logits, whole = drafter.logits(states, head), head(states)
    assert (logits.dtype, logits.shape) == (torch.float32, whole.shape)
    torch.testing.assert_close(logits[:, HOT], whole[:, HOT].float(), rtol=0.02, atol=0.1)
    cold = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(HOT), False)
    assert (logits.softmax(-1)[:, cold] == 0).all()
    # A request may allow no other tokens.
    probs = logits.masked_fill(~cold, -torch.inf).div(1e-5).softmax(-1)
    torch.testing.assert_close(probs, (cold / cold.sum()).expand(5, -1))


def test_all_tokens_are_drafted_unless_a_smaller_number_is_given(target: Target) -> None:
    for options in ({}, {"head": "whole"}, {"head": 512}, {"head": 600}):
        assert is_whole(drafter_for(target, **options))
    assert not is_whole(drafter_for(target, head=511))


def test_the_tokenizer_may_be_the_draft_models(target: Target, tmp_path: Path) -> None:
    draft = str(target.folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (None, empty):
        assert not is_whole(drafter_for(replace(target, folder=folder), head=262, model=draft))


def test_tokenizers_without_an_order_are_refused(target: Target) -> None:
    assert target.folder is not None
    (target.folder / "tokenizer.json").unlink()
    for folder in (target.folder, None):
        without = replace(target, folder=folder)
        with pytest.raises(ValueError, match=r"^head=262 .* tokenizer\.json .* head=whole$"):
            drafter_for(without, head=262)
        assert is_whole(drafter_for(without))


def test_heads_with_a_bias_or_a_cap_are_refused(target: Target) -> None:
    def capped(states: torch.Tensor) -> torch.Tensor:
        return 30 * torch.tanh(head(states) / 30)

    def biased(states: torch.Tensor) -> torch.Tensor:
        return head(states) + 1

    states = torch.randn(3, SIZE)
    for other in (capped, biased):
        drafter = drafter_for(target, head=262)
        with pytest.raises(ValueError, match=r"^head=262 .*'draft': .* Choose head=whole$"):
            drafter.read_head(other, SIZE, torch.float32)
        whole = drafter_for(target)
        whole.read_head(other, SIZE, torch.float32)
        assert torch.equal(whole.logits(states, other), other(states))


@pytest.mark.parametrize(("tree", "most"), [("beam:5x2", 5), ("branch:3-4", 4)])
def test_a_node_has_no_more_children_than_there_are_tokens(tree: str, most: int) -> None:
    options = {"model": "draft", "tree": tree}
    assert METHOD.options.model_validate({**options, "head": most})
    with pytest.raises(ValidationError, match=rf"head={most - 1}, .* choose {most} tokens or more"):
        METHOD.options.model_validate({**options, "head": most - 1})
