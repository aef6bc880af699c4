"""Drafts of the hot tokens alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for, serve
from torch.nn.functional import linear, pad

from drafttree.tree import Verified
from lyanna_plugin.checkpoint import save
from lyanna_plugin.model import LyannaModel


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("drafter")
    save(drafter_for(target), made)
    return made


def test_heads_with_a_bias_or_a_cap_are_refused(target: Path, folder: Path) -> None:
    weight = 0.1 * torch.randn(512, 128)

    def capped(states: torch.Tensor) -> torch.Tensor:
        return 30 * torch.tanh(linear(states, weight) / 30)

    def biased(states: torch.Tensor) -> torch.Tensor:
        return linear(states, weight, torch.ones(512))

    for head in (capped, biased):
        drafter = serve(target, folder)
        with pytest.raises(
            ValueError, match=r"head=hot, the default, .* bias or are capped\. Choose head=whole"
        ):
            drafter.read_head(head)
        whole = serve(target, folder, head="whole")
        whole.read_head(head)
        states = torch.randn(3, 128)
        assert torch.equal(whole.logits(states, head), head(states))


@pytest.mark.parametrize("options", [{}, {"tables": {"prime": False}}, {"resample": False}])
@pytest.mark.parametrize("head", ["hot", "whole"])
def test_the_targets_head_may_compute_in_float32(
    target: Path, folder: Path, head: str, options: dict[str, Any]
) -> None:
    """As with vLLM's `head_dtype` and SGLang's `--enable-fp32-lm-head`."""
    weight = torch.randn(512, 128).bfloat16()
    drafter = serve(target, folder, dtype=torch.bfloat16, head=head, nodes=12, **options)
    drafter.allocate(4, 128)

    def in_float32(states: torch.Tensor) -> torch.Tensor:
        return linear(states.float(), weight.float())

    drafter.read_head(in_float32)
    states = torch.randn(3, 128).bfloat16()
    logits = drafter.logits(states, in_float32)
    assert logits.dtype == torch.bfloat16
    roots, steps = torch.tensor([3], dtype=torch.int32), torch.tensor([3])
    trees = drafter.propose(torch.tensor([0]), roots, logits[None], steps)
    assert trees.tree_size.item() > 3


def test_the_drafter_reads_new_weights(target: Path, folder: Path) -> None:
    head = torch.nn.Linear(128, 512, bias=False).requires_grad_(False)
    drafter = serve(target, folder, head="hot")
    drafter.read_head(head)
    states = torch.randn(6, 128)
    first = drafter.logits(states, head)
    head.weight.neg_()
    drafter.on_new_weights()
    torch.testing.assert_close(drafter.logits(states, head)[:, :-1], -first[:, :-1])
    # Such weights are the target's own fault, and do not end the engine.
    head.weight.fill_(torch.nan)
    drafter.on_new_weights()
    assert drafter.logits(states, head)[:, :-1].isnan().all()


def test_more_children_than_hot_tokens_are_refused(target: Path, folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"width=65, .* head=hot, the default, only the 64 .* or head=whole"
    ):
        serve(target, folder, head="hot", width=65)
    assert serve(target, folder, head="hot", width=64)


@pytest.mark.parametrize("table", ["model", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_are_those_of_the_whole_head_without_cold_tokens(
    target: Path, tmp_path: Path, dtype: torch.dtype, table: str
) -> None:
    # Sorted, so that equal logits are in the same order in both.
    hot = torch.randperm(512)[:64].sort().values
    made = drafter_for(target)
    save(LyannaModel(made.layer_config, made.config, hot), tmp_path)
    of_hot, of_all = (
        serve(target, tmp_path, dtype=dtype, head=kind, table=table) for kind in ("hot", "whole")
    )
    of_all._embed = of_hot._embed
    of_all.on_new_weights()
    cold = torch.ones(512, dtype=torch.bool).index_fill(0, hot, False)
    slots, steps = torch.arange(4), torch.tensor([3, 3, 2, 0])
    for drafter in (of_hot, of_all):
        drafter.allocate(4, 64)
    # Roots of both kinds. In the second round there are second trees too.
    for roots in (torch.cat((hot[:2], cold.nonzero()[:2, 0])), cold.nonzero()[2:6, 0]):
        logits = (4 * torch.randn(4, 3, 512)).to(dtype).masked_fill(cold, -torch.inf)
        given = pad(logits[:, :, hot], (0, 1), value=-torch.inf), logits
        trees = [
            drafter.propose(slots, roots.int(), each, steps)
            for drafter, each in zip((of_hot, of_all), given, strict=True)
        ]
        assert trees[0].drafted
        assert set(trees[0].tokens[:, 1:].unique().tolist()) <= {-1, *hot.tolist()}
        for name in ("tokens", "parents", "tree_size"):
            assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name
        none = torch.zeros(4, 4, dtype=torch.int32)
        for drafter, tree in zip((of_hot, of_all), trees, strict=True):
            accepted = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
            drafter.on_verified(slots, tree, Verified(none, none, accepted + 1))
