"""Step by step: regular trees, and what rejected drafts leave for the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttree.drafter import DraftTree
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaTrees
from lyanna_plugin.tree import TokenTable, left_of, merge, sample_tree

VOCAB, STEPS, SIZE = 12, 3, 6
SLOTS = torch.tensor([4, 1])
ROOTS = torch.tensor([3, 7], dtype=torch.int32)


def options(**given: Any) -> LyannaOptions:
    return LyannaOptions(model="", **{"width": 2, "nodes": 4, "resample_nodes": 3, **given})


class Steps(LyannaTrees):
    """Proposes from hidden states."""

    head: torch.Tensor

    def from_states(
        self, slots: torch.Tensor, roots: torch.Tensor, states: torch.Tensor
    ) -> DraftTree:
        logits = states @ self.head.T
        return self.propose(slots, roots, logits, torch.full_like(slots, STEPS))


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
        drafter.allot(6)
        drafter.head = self.head
        return drafter

    def regular(self, step: int) -> DraftTree:
        logits = self.states[step] @ self.head.T
        return sample_tree(logits, torch.tensor([STEPS] * 2), ROOTS, self.info, 2, 4)

    def second(self, step: int, accepted: list[int]) -> DraftTree:
        all_steps = torch.tensor([STEPS] * 2)
        logits = self.states[step] @ self.head.T
        left, steps = left_of(logits, all_steps, torch.tensor(accepted))
        return sample_tree(left, steps, ROOTS, self.info, 2, 3)


def same(one: DraftTree, other: DraftTree) -> bool:
    sizes = torch.equal(one.num_nodes, other.num_nodes)
    width = int(one.num_nodes.max())
    return sizes and all(
        torch.equal(mine[:, :width], theirs[:, :width])
        for mine, theirs in ((one.tokens, other.tokens), (one.parents, other.parents))
    )


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_without_resampling_each_step_is_its_own(parts: Parts) -> None:
    drafter = parts.drafter(resample=False)
    for step in range(2):
        assert same(drafter.from_states(SLOTS, ROOTS, parts.states[step]), parts.regular(step))
        drafter.accepted(SLOTS, torch.tensor([0, 1]))


def test_what_is_left_is_verified_together_with_the_next_tree(parts: Parts) -> None:
    drafter = parts.drafter()
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[0]), parts.regular(0))
    drafter.accepted(SLOTS, torch.tensor([0, 2]))
    both = merge(parts.regular(1), parts.second(0, [0, 2]), STEPS)
    assert int(both.num_nodes[0]) > 5
    assert int(both.num_nodes[1]) == 5
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[1]), both)


def test_or_alone_before_it(parts: Parts) -> None:
    drafter = parts.drafter(fusion=False)
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accepted(SLOTS, torch.tensor([1, 3]))
    tree = drafter.from_states(SLOTS, ROOTS, parts.states[1])
    second, regular = parts.second(0, [1, 3]), parts.regular(1)
    for row, expected in ((0, second), (1, regular)):
        count = int(expected.num_nodes[row])
        assert int(tree.num_nodes[row]) == count
        assert torch.equal(tree.tokens[row, :count], expected.tokens[row, :count])
    drafter.accepted(SLOTS, torch.tensor([0, 3]))
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[2]), parts.regular(2))


def test_too_few_steps_left_are_not_worth_a_tree(parts: Parts) -> None:
    drafter = parts.drafter(resample_min_steps=1)
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accepted(SLOTS, torch.tensor([1, 1]))
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[1]), parts.regular(1))


def test_one_step_leaves_nothing(parts: Parts) -> None:
    drafter = parts.drafter(steps=1)
    logits = (parts.states[0] @ parts.head.T)[:, :1]
    for _ in range(2):
        tree = drafter.propose(SLOTS, ROOTS, logits, torch.tensor([1, 1]))
        assert tree.num_nodes.tolist() == [3, 3]
        drafter.accepted(SLOTS, torch.tensor([0, 1]))
    assert drafter.most_nodes(SLOTS).tolist() == [2, 2]


def test_a_request_that_begins_has_nothing_of_the_one_before(parts: Parts) -> None:
    drafter = parts.drafter()
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accepted(SLOTS, torch.tensor([0, 0]))
    drafter.forget(SLOTS)
    assert same(drafter.from_states(SLOTS, ROOTS, parts.states[1]), parts.regular(1))


def test_slots_not_rows_tell_requests_apart(parts: Parts) -> None:
    drafter = parts.drafter()
    drafter.from_states(SLOTS, ROOTS, parts.states[0])
    drafter.accepted(SLOTS, torch.tensor([0, 0]))
    turned = drafter.from_states(SLOTS.flip(0), ROOTS.flip(0), parts.states[1].flip(0))
    both = merge(parts.regular(1), parts.second(0, [0, 0]), STEPS)
    assert same(
        DraftTree(turned.tokens.flip(0), turned.parents.flip(0), turned.num_nodes.flip(0)), both
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
def test_the_most_nodes_are_those_of_both_trees(given: dict[str, Any], nodes: int) -> None:
    assert options(**given).num_nodes == nodes


def test_fewer_nodes_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes=2 are fewer than steps=3"):
        LyannaOptions(model="", nodes=2)


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 255 together"):
        LyannaOptions(model="", steps=9, width=8, nodes=200, resample_nodes=200)
