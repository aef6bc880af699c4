"""Lyanna's trees with the candidates of Token Recycling's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for, predict_embeddings
from tiny_models import make_tiny_llama

from drafttree.drafter import Attend, HiddenStateDrafter, Target
from drafttree.testing import check_drafter, random_target
from drafttree.tree import DraftTree, Verified
from lyanna_plugin import METHOD
from lyanna_plugin.checkpoint import save
from recycle_plugin import METHOD as TOKEN_RECYCLING
from recycle_plugin import DynamicTreeDrafter

NODES, STEPS = 12, 100


class TablesAlone(HiddenStateDrafter):
    """Token Recycling in the place of a hidden-state drafter, whose layer is not used."""

    heads = (1, 1, 1)

    def __init__(self, tables: DynamicTreeDrafter) -> None:
        self.tables = tables
        self.max_depth = tables.max_depth

    @property
    def steps(self) -> int:
        return 1

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        self.tables.allocate(max_requests, max_model_len)

    def fuse(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return hidden

    def layer(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return x

    def max_draft_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.full_like(slots, NODES)

    def propose(
        self, slots: torch.Tensor, roots: torch.Tensor, logits: torch.Tensor, steps: torch.Tensor
    ) -> DraftTree:
        trees = self.tables.propose(slots, roots.masked_fill(steps == 0, -1))
        return DraftTree(
            torch.cat((roots[:, None], trees.tokens[:, 1:]), 1), trees.parents, trees.tree_size
        )

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        self.tables.on_verified(slots, trees, verified)

    def release(self, slots: Any) -> None:
        self.tables.release(slots)

    def reset(self) -> None:
        self.tables.reset()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("target"), vocab_size=96)
    module = drafter_for(folder)
    # An embedding is the hidden state of the test's target.
    predict_embeddings(module)
    out = tmp_path_factory.mktemp("drafter")
    save(module, out)
    return random_target(vocab_size=96, hidden_size=128, model=str(folder)), out


def accepted(target: Target, drafter: HiddenStateDrafter, depth: int) -> int:
    return check_drafter(drafter, NODES, depth, target, STEPS)


def test_with_tables_more_is_accepted_than_from_either_alone(parts: tuple[Target, Path]) -> None:
    target, folder = parts
    options = {"model": str(folder), "nodes": NODES, "resample": False}
    recycling = TOKEN_RECYCLING.parse({"nodes": NODES, "prime": False})
    tables = TOKEN_RECYCLING.drafter(recycling, target)
    alone = accepted(target, TablesAlone(tables), recycling.depth)
    without = METHOD.parse(options)
    layer = accepted(target, METHOD.drafter(without, target), without.depth)
    given = METHOD.parse({**options, "tables": {"prime": False}})
    assert given.num_draft_tokens == NODES
    both = accepted(target, METHOD.drafter(given, target), given.depth)
    assert both > max(alone, layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": "yes"}, "tables='yes': use true, false, or an object"),
        ({"tables": {"nodes": 8}}, "nodes is not used, as Lyanna's nodes decides: leave it out"),
        ({"tables": {"memory": -1}}, "memory=-1"),
        ({"tables": {"tabels": 1}}, "no option 'tabels'"),
        ({"tables": True, "nodes": "auto"}, "nodes=auto .*give nodes a number"),
        ({"tables": True, "fusion": False}, "fusion=false .*leave fusion out"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHOD.parse({"model": "any", **options})


def test_trees_are_as_large_as_without_tables() -> None:
    for options in ({}, {"resample": False}, {"nodes": 40, "resample_nodes": 30}, {"steps": 1}):
        alone = METHOD.parse({"model": "any", **options})
        given = METHOD.parse({"model": "any", "tables": True, **options})
        assert given.num_draft_tokens == alone.num_draft_tokens
        assert given.depth >= alone.depth
        assert METHOD.parse({"model": "any", "tables": False, **options}) == alone
