"""Regular trees, and second trees from the logits that remain after a rejection."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from drafttree.tree import DraftTree, Verified
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaTrees
from lyanna_plugin.tree import TokenTable, merge, resample_logits, sample_tree

VOCAB, STEPS, SIZE = 12, 3, 6
SLOTS = torch.tensor([4, 1])
ROOTS = torch.tensor([3, 7], dtype=torch.int32)


def options(**given: Any) -> LyannaOptions:
    return LyannaOptions(model="", **{"width": 2, "nodes": 4, "resample_nodes": 3, **given})


class Steps(LyannaTrees):
    """Drafts from hidden states, with logits from a test's head."""

    head: torch.Tensor
    trees: DraftTree

    def from_states(
        self, slots: torch.Tensor, roots: torch.Tensor, states: torch.Tensor
    ) -> DraftTree:
        logits = states @ self.head.T
        self.trees = self.propose(slots, roots, logits, torch.full_like(slots, STEPS))
        return self.trees

    def accept(self, slots: torch.Tensor, drafts: list[int]) -> None:
        """Verify the last trees, with a given number of accepted draft tokens for each."""
        accepted = torch.tensor(drafts, dtype=torch.int32)
        emitted = torch.zeros(len(slots), self.max_depth + 1, dtype=torch.int32)
        self.on_verified(slots, self.trees, Verified(emitted, emitted, accepted + 1))


class Parts:
    """A head, token info and the hidden states of three steps."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        every = torch.arange(VOCAB, dtype=torch.int32)
        self.info = TokenTable(torch.randn(VOCAB, VOCAB, generator=generator), every, every)
        self.head = torch.randn(VOCAB, SIZE, generator=generator)
        self.states = torch.randn(3, 2, STEPS, SIZE, generator=generator)

    def drafter(self, **given: Any) -> Steps:
        drafter = Steps(options(**given), self.info, torch.float32)
        drafter.allocate(6, 64)
        drafter.head = self.head
        return drafter

    def regular(self, step: int) -> DraftTree:
        logits = self.states[step] @ self.head.T
        return sample_tree(logits, torch.tensor([STEPS] * 2), ROOTS, self.info, 2, 4)

    def second(self, step: int, accepted: list[int]) -> DraftTree:
        all_steps = torch.tensor([STEPS] * 2)
        logits = self.states[step] @ self.head.T
        remaining, steps = resample_logits(logits, all_steps, torch.tensor(accepted))
        return sample_tree(remaining, steps, ROOTS, self.info, 2, 3)


def same(one: DraftTree, other: DraftTree) -> bool:
    sizes = torch.equal(one.tree_size, other.tree_size)
    width = int(one.tree_size.max())
    return sizes and all(
        torch.equal(mine[:, :width], theirs[:, :width])
        for mine, theirs in ((one.tokens, other.tokens), (one.parents, other.parents))
    )


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_without_resampling_each_tree_is_the_regular_one(parts: Parts) -> None:
    drafter = parts.drafter(resample=False)
    for step in range(2):
        assert same(drafter.from_states(SLOTS, ROOTS, parts.states[step]), parts.regular(step))
        drafter.accept(SLOTS, [0, 1])


def test_the_second_tree_is_verified_together_with_the_regular_one(parts: Parts) -> None:
    drafter = parts.drafter()
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[0]), parts.regular(0))
    drafter.accept(SLOTS, [0, 2])
    both = merge(parts.regular(1), parts.second(0, [0, 2]), STEPS)
    assert int(both.tree_size[0]) > 5
    assert int(both.tree_size[1]) == 5
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[1]), both)


def test_without_fusion_the_second_tree_is_verified_before_the_regular_one(parts: Parts) -> None:
    drafter = parts.drafter(fusion=False)
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accept(SLOTS, [1, 3])
    tree = drafter.from_states(SLOTS, ROOTS, parts.states[1])
    second, regular = parts.second(0, [1, 3]), parts.regular(1)
    for row, expected in ((0, second), (1, regular)):
        count = int(expected.tree_size[row])
        assert int(tree.tree_size[row]) == count
        assert torch.equal(tree.tokens[row, :count], expected.tokens[row, :count])
    drafter.accept(SLOTS, [0, 3])
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[2]), parts.regular(2))


def test_too_few_remaining_steps_give_no_second_tree(parts: Parts) -> None:
    drafter = parts.drafter(resample_min_steps=1)
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accept(SLOTS, [1, 1])
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[1]), parts.regular(1))


def test_one_step_leaves_no_steps(parts: Parts) -> None:
    drafter = parts.drafter(steps=1)
    logits = (parts.states[0] @ parts.head.T)[:, :1]
    for _ in range(2):
        tree = drafter.trees = drafter.propose(SLOTS, ROOTS, logits, torch.tensor([1, 1]))
        assert tree.tree_size.tolist() == [3, 3]
        drafter.accept(SLOTS, [0, 1])
    assert drafter.max_draft_tokens(SLOTS).tolist() == [2, 2]


def test_a_released_slot_has_no_remaining_steps(parts: Parts) -> None:
    drafter = parts.drafter()
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accept(SLOTS, [0, 0])
    drafter.release(SLOTS.tolist())
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[1]), parts.regular(1))


def test_after_a_reset_no_steps_remain(parts: Parts) -> None:
    drafter = parts.drafter()
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accept(SLOTS, [0, 0])
    assert drafter.max_draft_tokens(SLOTS).tolist() == [7, 7]
    drafter.reset()
    assert drafter.max_draft_tokens(SLOTS).tolist() == [4, 4]
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[1]), parts.regular(1))


def test_after_a_step_without_drafts_no_steps_remain(parts: Parts) -> None:
    """The second request has one step without drafts; the first keeps its remaining steps."""
    drafter = parts.drafter()
    trees = drafter.from_states(SLOTS, ROOTS, parts.states[0])
    sizes = torch.tensor([int(trees.tree_size[0]), 1], dtype=torch.int32)
    drafter.trees = DraftTree(trees.tokens, trees.parents, sizes)
    drafter.accept(SLOTS, [0, 0])
    assert drafter.max_draft_tokens(SLOTS).tolist() == [7, 4]
    tree = drafter.from_states(SLOTS, ROOTS, parts.states[1])
    both, regular = merge(parts.regular(1), parts.second(0, [0, 0]), STEPS), parts.regular(1)
    for row, expected in ((0, both), (1, regular)):
        count = int(expected.tree_size[row])
        assert int(tree.tree_size[row]) == count
        assert torch.equal(tree.tokens[row, :count], expected.tokens[row, :count])


def test_state_belongs_to_slots_not_to_rows(parts: Parts) -> None:
    drafter = parts.drafter()
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accept(SLOTS, [0, 0])
    turned = drafter.from_states(SLOTS.flip(0), ROOTS.flip(0), parts.states[1].flip(0))
    both = merge(parts.regular(1), parts.second(0, [0, 0]), STEPS)
    assert same(
        DraftTree(turned.tokens.flip(0), turned.parents.flip(0), turned.tree_size.flip(0)), both
    )


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ({}, 7),
        ({"fusion": False}, 4),
        ({"resample": False}, 4),
        ({"nodes": 50, "resample_nodes": 50}, 10 + 6),
        ({"steps": 1}, 2),
    ],
)
def test_num_draft_tokens_covers_both_trees(given: dict[str, Any], nodes: int) -> None:
    assert options(**given).num_draft_tokens == nodes


def test_fewer_nodes_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes=2 are fewer than steps=3"):
        LyannaOptions(model="", nodes=2)


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 255 together"):
        LyannaOptions(model="", steps=9, width=8, nodes=200, resample_nodes=200)


def test_shapes_of_nodes_auto_ascend_and_fit() -> None:
    for steps, width in itertools.product((1, 2, 3, 5, 12), (1, 2, 4, 9)):
        options = LyannaOptions(model="any", nodes="auto", steps=steps, width=width)
        sizes = [shape.nodes for shape in options.shapes]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == options.num_draft_tokens <= 12
        assert max(shape.depth for shape in options.shapes) == steps
        assert all(shape.depth <= shape.nodes for shape in options.shapes)


def test_no_second_trees_are_drafted_by_default() -> None:
    options = LyannaOptions(model="any")
    assert options.auto
    assert options.num_draft_tokens == 12
    assert not LyannaOptions(model="any", resample=False).second_draft_tokens(2)
    assert LyannaOptions(model="any", nodes=12).num_draft_tokens == 24


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"resample": True}, "resample=true"),
        ({"resample_nodes": 5}, "resample_nodes=5"),
        ({"resample_min_steps": 1, "nodes": "auto"}, "resample_min_steps=1"),
        ({"fusion": False}, "fusion=false"),
    ],
)
def test_options_of_second_trees_need_a_number_of_nodes(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} is about second trees.*give a number of nodes"):
        LyannaOptions(model="any", **given)


def test_nodes_auto_is_refused_for_deeper_trees() -> None:
    with pytest.raises(ValueError, match="nodes=auto, up to 12, are fewer than steps=13"):
        LyannaOptions(model="any", nodes="auto", steps=13)


@pytest.mark.parametrize("nodes", [0, 256, "all"])
def test_nodes_out_of_range(nodes: int | str) -> None:
    with pytest.raises(ValueError, match="nodes"):
        LyannaOptions.model_validate({"model": "any", "nodes": nodes})
