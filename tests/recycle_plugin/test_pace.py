"""The pace of drafting: which steps are timed, and what the planner hears of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drafttree.drafter import DraftTree
from drafttree.transfer import Coming
from drafttree.verify import Verified
from recycle_plugin.costs import Costs
from recycle_plugin.pace import Pace, ladder_to, measured_costs
from recycle_plugin.planner import Planner

LOOK = 0.25
"""Seconds of a look by the tests' clock."""


SCORES = torch.tensor([[1.0, 0.5, 0.1, 0.25, 0.2, 0.0, 0.0], [1.0, 0.9, 0.8, 0.9, 0.9, 0.8, 0.8]])
"""Of two requests' nodes, the roots' first."""


class Heard(Planner):
    """A planner that always drafts 3 nodes, and remembers what it is told."""

    def __init__(self) -> None:
        super().__init__((0, 3, 7), Costs.of_forwards({1: 1.0}))
        self.tokens: list[list[list[float]]] = []
        self.told: list[tuple[int, int, float, float, int]] = []
        self.paid: list[tuple[int, float, int]] = []
        self.rest = False

    def rests(self, batch: int) -> bool:
        return self.rest

    def choose(self, batch: int, tokens: np.ndarray[Any, Any]) -> int:
        self.tokens.append(tokens.tolist())
        return 3

    def cut(self, batch: int, seconds: float, emitted: int) -> None:
        self.paid.append((batch, seconds, emitted))

    def finished(self, batch: int, n: int, seconds: float, look: float, emitted: int) -> None:
        self.told.append((batch, n, seconds, look, emitted))


class Steps:
    """Two requests with trees of three nodes, decoding by a clock of our own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.planner = Heard()
        self.pace = Pace(self.planner, lambda: self.now)

    def propose(self, *slots: int) -> None:
        batch = len(slots)
        self.slots = torch.tensor(slots)
        if self.pace.rests(self.slots):
            return
        self.now += LOOK
        self.pace.choose(self.slots, SCORES[:batch])
        tokens = torch.arange(4, dtype=torch.int32).expand(batch, -1)
        parents = torch.tensor([-1, 0, 0, 1], dtype=torch.int32).expand(batch, -1)
        self.trees = DraftTree(tokens, parents, torch.full((batch,), 4, dtype=torch.int32))
        self.pace.proposed(self.trees)

    def verify(self, *emitted: int, trees: DraftTree | None = None) -> None:
        tokens = torch.full((len(emitted), 3), -1, dtype=torch.int32)
        for row, count in enumerate(emitted):
            tokens[row, :count] = 5
        counts = torch.tensor(emitted, dtype=torch.int32)
        self.pace.verified(self.slots, trees or self.trees, Verified(tokens, tokens, counts))


def test_a_step_lasts_from_one_proposal_to_the_next() -> None:
    steps = Steps()
    steps.propose(4, 2)
    steps.now = 2.0
    steps.verify(1, 3)
    steps.now = 3.0
    steps.propose(4, 2)
    assert steps.planner.told == [(2, 3, 3.0, LOOK, 4)]
    steps.now = 3.5
    steps.verify(2, 1)
    steps.propose(4, 2)
    assert steps.planner.told[1:] == [(2, 3, 0.5, LOOK, 3)]


def test_plain_steps_are_timed_too() -> None:
    steps = Steps()
    steps.planner.rest = True
    steps.propose(4, 2)
    steps.now = 2.0
    steps.verify(1, 1, trees=DraftTree.of_roots(torch.tensor([7, 8], dtype=torch.int32)))
    steps.propose(4, 2)
    assert steps.planner.told == [(2, 0, 2.0, 0.0, 2)]


def test_a_rung_is_worth_what_its_best_nodes_are() -> None:
    steps = Steps()
    steps.propose(4, 2)
    first, second = steps.planner.tokens[0]
    assert first == pytest.approx([1.0, 1.95, 2.05])
    assert second == pytest.approx([1.0, 3.7, 6.1])


def test_steps_that_were_not_as_planned_are_not_told() -> None:
    def another_batch(steps: Steps) -> None:
        steps.verify(1, 1)
        steps.propose(4)

    def a_prompt_between(steps: Steps) -> None:
        steps.verify(1, 1)
        steps.pace.interrupted()

    def a_prompt_in_part(steps: Steps) -> None:
        steps.verify(1, 0)

    def two_steps(steps: Steps) -> None:
        steps.verify(1, 1)
        steps.verify(1, 1)

    def never_verified(steps: Steps) -> None:
        pass

    for happens in (
        another_batch,
        a_prompt_between,
        a_prompt_in_part,
        two_steps,
        never_verified,
    ):
        steps = Steps()
        steps.propose(4, 2)
        steps.now = 1.0
        happens(steps)
        steps.now = 2.0
        steps.propose(4, 2)
        assert steps.planner.told == [], happens.__name__
        assert steps.planner.paid == [], happens.__name__


def test_steps_that_the_host_cut_are_paid_for() -> None:
    steps = Steps()
    steps.propose(4, 2)
    cut = DraftTree(
        steps.trees.tokens[:, :2], steps.trees.parents[:, :2], steps.trees.num_nodes - 2
    )
    steps.verify(1, 2, trees=cut)
    steps.now = 2.0
    steps.propose(4, 2)
    assert steps.planner.told == []
    assert steps.planner.paid == [(2, 2.0, 3)]


def test_costs_are_measured_up_to_the_largest_step() -> None:
    asked: list[int] = []

    def forward(tokens: int) -> float:
        asked.append(tokens)
        return 1.0 + tokens

    costs = measured_costs(forward, 17)
    assert sorted(set(asked)) == [1, 2, 4, 8, 12, 16, 17]
    assert costs.forward(17) == 18.0
    assert costs.forward(14) == 15.0
    assert measured_costs(forward, 1).forward(1) == 2.0


def test_the_ladder_ends_with_the_most_nodes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert ladder_to(80, cpu)[-2:] == (63, 80)
    assert ladder_to(10, cpu) == (0, 3, 7, 10)
    assert ladder_to(1, cpu) == (0, 1)
    assert ladder_to(80, cuda) == (0, 7, 15, 31, 80)
    assert ladder_to(20, cuda) == (0, 7, 15, 20)


def test_scores_that_a_device_is_still_at_are_looked_at_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def still_coming(tensor: torch.Tensor) -> Coming:
        return Coming(tensor, torch.Event("cpu"))

    monkeypatch.setattr(Coming, "of", still_coming)
    monkeypatch.setattr(Coming, "wait", lambda coming: coming.values)
    steps = Steps()
    steps.propose(4, 2)
    first = steps.planner.tokens[0]
    better = torch.tensor([[1.0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]])
    steps.pace.choose(torch.tensor([4]), better)
    assert steps.planner.tokens[1] == first
    steps.pace.choose(torch.tensor([4]), better)
    assert steps.planner.tokens[2] == [pytest.approx([1.0, 3.7, 6.4])]
