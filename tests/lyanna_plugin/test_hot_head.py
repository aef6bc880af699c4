"""Drafts of the hot tokens alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lyanna_parts import drafter_for, serve
from tiny_models import make_tiny_llama
from torch.nn import functional as F

from lyanna_plugin.checkpoint import save
from lyanna_plugin.hot_head import HotHead

SIZE, VOCAB = 300, 512
HOT = torch.tensor([3, 7, 500, 1], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_whole_head(dtype: torch.dtype) -> None:
    head = torch.nn.Linear(SIZE, VOCAB, bias=False, dtype=dtype).requires_grad_(False)
    hot = HotHead(HOT, VOCAB, SIZE, dtype, torch.device("cpu"))
    states = torch.randn(5, SIZE, dtype=dtype)
    for scale in (1.0, 3.0):
        head.weight *= scale
        hot.read(head)
        logits, whole = hot.logits(states), head(states)
        assert logits.dtype == dtype
        torch.testing.assert_close(logits[:, HOT], whole[:, HOT], rtol=0.02, atol=0.02)
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, HOT.long(), False)
        assert logits[:, others].isneginf().all()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("drafter")
    save(drafter_for(target), made)
    return made


def test_heads_with_a_bias_or_a_cap_are_refused(target: Path, folder: Path) -> None:
    weight = 0.1 * torch.randn(512, 128)

    def capped(states: torch.Tensor) -> torch.Tensor:
        return 30 * torch.tanh(F.linear(states, weight) / 30)

    def biased(states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, weight, torch.ones(512))

    for head in (capped, biased):
        drafter = serve(target, folder, head="hot")
        with pytest.raises(ValueError, match=r"head=hot .* bias or are capped\. Choose head=whole"):
            drafter.read_head(head)
        whole = serve(target, folder)
        whole.read_head(head)
        states = torch.randn(3, 128)
        assert torch.equal(whole.logits(states, head), head(states))


def test_the_drafter_drafts_hot_tokens_and_reads_new_weights(target: Path, folder: Path) -> None:
    head = torch.nn.Linear(128, 512, bias=False).requires_grad_(False)
    drafter = serve(target, folder, head="hot", resample=False)
    drafter.allocate(2, 64)
    drafter.read_head(head)
    states = torch.randn(2 * 3, 128)
    first = drafter.logits(states, head)
    slots, roots = torch.tensor([0, 1]), torch.tensor([400, 5], dtype=torch.int32)
    trees = drafter.propose(slots, roots, first.view(2, 3, 512), torch.full((2,), 3))
    assert trees.drafted
    assert int(trees.tokens[:, 1:].max()) < 64
    head.weight.neg_()
    drafter.on_new_weights()
    again, is_hot = drafter.logits(states, head), ~first.isneginf()
    torch.testing.assert_close(again[is_hot], -first[is_hot])
