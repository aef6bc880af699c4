"""Lyanna's trees with the candidates of Token Recycling's tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for, predict_embeddings
from tiny_models import make_tiny_llama

from drafttree.budget import TreeChoice
from drafttree.budget.level_acceptance import NO_DRAFTS
from drafttree.model_drafters import Attend, HiddenStateDrafter
from drafttree.target import Target
from drafttree.testing import check_drafter, random_target
from drafttree.tree import DraftTree, Verified
from lyanna_plugin import METHOD
from lyanna_plugin.checkpoint import save
from lyanna_plugin.drafter import LyannaDrafter
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

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return x if last is None else x[last]

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
    options = {"model": str(folder), "nodes": NODES, "resample": False, "head": "whole"}
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
        ({"tables": {"max_nodes": 30}, "nodes": 12}, "max_nodes .*nodes=12: .*choose nodes=auto"),
        ({"tables": {"max_nodes": 300}}, "max_nodes=300"),
        ({"tables": True, "nodes": 12, "fusion": False}, "fusion=false .*leave fusion out"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHOD.parse({"model": "any", **options})


def test_nodes_auto_has_a_shape_for_each_step_of_the_layer() -> None:
    for steps, width in ((1, 4), (3, 4), (5, 1), (12, 2)):
        given = METHOD.parse(
            {"model": "any", "tables": True, "nodes": "auto", "steps": steps, "width": width}
        )
        assert [shape.depth for shape in given.shapes] == [*range(1, steps + 1)]
        sizes = [shape.nodes for shape in given.shapes]
        assert sizes == sorted({*sizes})
        assert sizes[-1] == NODES


def test_nodes_auto_is_refused_with_tables_on_a_gpu(parts: tuple[Target, Path]) -> None:
    target, folder = parts
    given = METHOD.parse({"model": str(folder), "tables": True, "nodes": "auto"})
    with pytest.raises(ValueError, match=r"nodes=auto with tables .*give nodes another value"):
        METHOD.drafter(given, replace(target, device=torch.device("cuda")))


SLOTS = torch.tensor([1, 0])
ROOTS = torch.tensor([5, 6], dtype=torch.int32)


def test_trees_of_tables_alone_are_those_of_token_recycling(parts: tuple[Target, Path]) -> None:
    """Between trees of both, of which the worth of nodes is learnt from."""
    target, folder = parts
    options = {"model": str(folder), "tables": {"prime": False}, "head": "whole"}
    given = METHOD.parse(options)
    drafter = METHOD.drafter(given, target)
    assert isinstance(drafter, LyannaDrafter)
    drafter.allocate(2, 64)
    drafter.profile(lambda tokens: 0.01, 200)
    assert isinstance(drafter.tables, DynamicTreeDrafter)
    alone = TOKEN_RECYCLING.drafter(TOKEN_RECYCLING.parse({"nodes": 7, "prime": False}), target)
    assert isinstance(alone, DynamicTreeDrafter)
    alone.allocate(2, 64)
    for tables in (drafter.tables, alone):
        tables.tables.matrix.copy_((torch.arange(96)[:, None] + torch.arange(1, 9)) % 96)
        for slot, root in zip(SLOTS.tolist(), ROOTS.tolist(), strict=True):
            tables.start(slot, [root])
    budget = drafter.tables._budget
    assert budget is not None
    budget.planner.should_skip_drafting = lambda *_: False  # type: ignore[method-assign]
    budget.planner.choose_best_first = lambda *_, **__: TreeChoice(7)  # type: ignore[method-assign]
    logits = torch.randn(2, 2, 96, generator=torch.Generator().manual_seed(0))
    for shape in (given.shapes[1], NO_DRAFTS, given.shapes[0], NO_DRAFTS):
        if shape.depth:
            drafter.follow_plan(shape)
            assert drafter.steps == shape.depth
            assert drafter.max_draft_tokens(SLOTS).tolist() == [shape.nodes] * 2
            depths = torch.tensor([shape.depth] * 2)
            trees = drafter.propose(SLOTS, ROOTS, logits[:, : shape.depth], depths)
            assert (trees.tree_size == 1 + shape.nodes).all()
            names = {"draft layer", "tables", "draft layer and tables"}
        else:
            trees = drafter.propose_without_model(SLOTS, ROOTS)
            expected = alone.propose(SLOTS, ROOTS)
            assert torch.equal(trees.tokens, expected.tokens)
            assert torch.equal(trees.parents, expected.parents)
            names = {"tables"}
        path = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
        emitted = trees.tokens.gather(1, path.roll(-1, 1).long())
        emitted[:, 1] = ROOTS
        before = tried(drafter)
        outcome = Verified(path, emitted, torch.tensor([2, 2], dtype=torch.int32))
        drafter.on_verified(SLOTS, trees, outcome)
        alone.on_verified(SLOTS, DraftTree.of_roots(ROOTS), outcome)
        alone.tables.source_stats.priors.copy_(drafter.tables.tables.source_stats.priors)
        after = tried(drafter)
        assert {name for name in after if after[name] > before.get(name, 0)} <= names
        assert sum(after.values()) > sum(before.values())


def tried(drafter: LyannaDrafter) -> dict[str, int]:
    """How many nodes were tried, by who proposed them."""
    return {row["source"]: row["tried"] for row in drafter.acceptance()["sources"]}


def test_trees_are_as_large_as_without_tables() -> None:
    for changed in ({}, {"resample": False}, {"nodes": 40, "resample_nodes": 30}, {"steps": 1}):
        options: dict[str, Any] = {"nodes": 12, **changed}
        alone = METHOD.parse({"model": "any", **options})
        given = METHOD.parse({"model": "any", "tables": True, **options})
        assert given.num_draft_tokens == alone.num_draft_tokens
        assert given.depth >= alone.depth
        assert METHOD.parse({"model": "any", "tables": False, **options}) == alone
