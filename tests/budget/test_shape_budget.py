"""Steps with a model's drafts, measured on a clock of the test's."""

from __future__ import annotations

import pytest
import torch

from drafttree.budget import ShapeBudget, TreeShape, shape_budget
from drafttree.tree import DraftTree, Verified

SHAPES = (TreeShape(1, 1, 1), TreeShape(3, 1, 3))
SLOTS = torch.tensor([4])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chain(nodes: int) -> DraftTree:
    columns = torch.arange(1 + nodes, dtype=torch.int32)[None]
    return DraftTree(columns, columns - 1, torch.tensor([1 + nodes], dtype=torch.int32))


def outcome(accepted: int, most: int) -> Verified:
    path = torch.arange(1 + most, dtype=torch.int32)[None]
    path = path.masked_fill(path > accepted, -1)
    return Verified(path, path, torch.tensor([1 + accepted], dtype=torch.int32))


def test_measures_drafting_and_leaves_catching_up_out() -> None:
    clock = Clock()
    budget = ShapeBudget.from_forwards(SHAPES, {1: 0.03, 4: 0.03}, clock)
    shape = budget.choose(SLOTS)
    assert shape.nodes == 3
    budget.drafted(0.01, catch_up_seconds=0.5)
    budget.drafted(0.002)
    budget.verified(SLOTS, chain(3), outcome(2, 3))
    clock.now = 0.55
    budget.choose(SLOTS)
    (row,) = budget.explain()
    assert row["num_draft_tokens"] == 3
    assert row["observed_ms"] == pytest.approx(50)
    assert row["realised_tokens"] == 3
    assert budget.planner.acceptance.evidence == pytest.approx(1, rel=0.01)
    assert budget.planner.draft_times.usual(1, 4) == 0  # the first drafts are not measured
    budget.drafted(0.012)
    budget.verified(SLOTS, chain(3), outcome(2, 3))
    clock.now = 0.6
    budget.choose(SLOTS)
    assert budget.planner.draft_times.usual(1, 4) == pytest.approx(0.012)


def test_trees_that_the_host_cut_to_their_roots_are_plain_steps() -> None:
    clock = Clock()
    budget = ShapeBudget.from_forwards(SHAPES, {1: 0.03, 4: 0.03}, clock)
    assert budget.choose(SLOTS).nodes == 3
    budget.verified(SLOTS, chain(0), outcome(0, 0))
    clock.now = 0.03
    budget.choose(SLOTS)
    (row,) = budget.explain()
    assert row["num_draft_tokens"] == 0
    assert budget.planner.draft_times.usual(1, 4) == 0


def test_the_next_request_in_a_slot_is_not_measured() -> None:
    """Between the end of a request and the prompt of the next one nothing may run for long."""
    clock = Clock()
    budget = ShapeBudget.from_forwards(SHAPES, {1: 0.03, 4: 0.03}, clock)
    budget.choose(SLOTS)
    budget.discard()
    budget.verified(SLOTS, chain(0), outcome(0, 0))
    clock.now = 50.0
    budget.choose(SLOTS)
    assert budget.explain() == []


def test_a_step_of_other_requests_is_not_measured() -> None:
    clock = Clock()
    budget = ShapeBudget.from_forwards(SHAPES, {1: 0.03, 4: 0.03}, clock)
    budget.choose(SLOTS)
    budget.verified(torch.tensor([4, 5]), chain(3), outcome(1, 3))
    clock.now = 1.0
    budget.choose(SLOTS)
    assert budget.explain() == []


def test_forgets_what_was_accepted() -> None:
    clock = Clock()
    budget = ShapeBudget.from_forwards(SHAPES, {1: 0.03, 4: 0.03}, clock)
    for looks_before in (True, False):
        budget.choose(SLOTS)
        budget.verified(SLOTS, chain(3), outcome(1, 3))
        if looks_before:
            budget.explain()
            assert budget.planner.acceptance.evidence > 0
        budget.reset()
        budget.explain()
        assert budget.planner.acceptance.evidence == 0
    clock.now = 60.0
    budget.choose(SLOTS)
    assert budget.explain() == []  # new weights were loaded meanwhile


def test_steps_are_recorded_before_the_next_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions and reports are those of a budget that records each step by itself."""

    def steps(most_unrecorded: int) -> tuple[list[int], list[int], list[dict[str, float]]]:
        monkeypatch.setattr(shape_budget, "_MOST_UNRECORDED", most_unrecorded)
        clock = Clock()
        budget = ShapeBudget.from_forwards(SHAPES, {1: 0.03, 4: 0.06}, clock)
        sizes, recorded = [], []
        for step in range(400):
            accepted = 3 if step > 250 else 0
            nodes = budget.choose(SLOTS, drafted=0 if 60 < step < 100 else None).nodes
            sizes.append(nodes)
            recorded.append(budget.planner.costs.clock)
            if nodes:
                budget.drafted(0.01)
            budget.verified(SLOTS, chain(nodes), outcome(min(accepted, nodes), nodes))
            clock.now += 0.03 + 0.02 * nodes + 0.001 * (step % 3)
        return sizes, recorded, budget.explain()

    alone, together = steps(1), steps(16)
    assert together[0] == alone[0]
    assert together[2] == alone[2]
    assert alone[0].count(0) > 100
    assert alone[1] == [*range(400)]
    behind = [first - second for first, second in zip(alone[1], together[1], strict=True)]
    assert max(behind) == 15
    assert behind.count(0) < 200
