"""Shapes that are chosen some steps ahead, from outcomes that arrive late."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
import pytest
from simulated_drafting import BEAMS, Fixed, Run, Scenario, Step, run

from drafttree.budget.level_acceptance import NO_DRAFTS
from drafttree.budget.model_drafts import ModelDrafts
from drafttree.budget.shape_controller import ShapeController
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.budget.tier_controller import TierOutcome, TierPlan
from drafttree.tree_shape import TreeShape

STEPS = 2500
FORWARDS = {1: 0.03, 16: 0.03}


class Late:
    """Decodes with the shapes that the controller chooses for the step after the current one.

    Args:
        scenario: The scenario, whose forwards are measured at the start.
        late: Steps from the last outcome that is known at a decision to the step that it is for.
    """

    def __init__(self, scenario: Scenario, late: int) -> None:
        planner = ShapePlanner(BEAMS, scenario.forwards(), pads_trees=scenario.pads)
        self.controller = ShapeController(planner)
        self._requests = [*range(scenario.batch)]
        self._late = late
        self._plan = self._next = TierPlan(0)
        self._in_flight: deque[TierOutcome] = deque()

    def choose(self, batch_size: int, catch_up_seconds: float) -> TreeShape:
        self._plan = self._next
        while len(self._in_flight) > self._late - 2:
            self.controller.record(self._in_flight.popleft())
        self._next = self.controller.choose(self._requests, 15)
        sizes = [NO_DRAFTS, *BEAMS]
        return next(shape for shape in sizes if shape.nodes == self._plan.size)

    def learn(self, shape: TreeShape, step: Step) -> None:
        batch = len(self._requests)
        unread = 0 if shape.depth else 4 * batch
        tokens = 4 * batch if step.catch_up_seconds else 0
        self._in_flight.append(
            TierOutcome(
                self._plan,
                self._requests,
                step.rows,
                step.tokens,
                None,
                step.seconds + step.catch_up_seconds,
                ModelDrafts(
                    *(step.trees.parents.numpy(), step.paths, step.draft_seconds),
                    *(tokens, step.catch_up_seconds, unread),
                ),
            )
        )


def decoded(scenario: Scenario, steps: int = STEPS, late: int = 3) -> Run:
    return run(scenario, Late(scenario, late), steps)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(first=lambda step: 0.1),
        pytest.param(Scenario(draft_fixed=0.02, draft_by_row=0.001), marks=pytest.mark.full),
        pytest.param(Scenario(by_row=0.02, first=lambda step: 0.3), marks=pytest.mark.full),
    ],
    ids=["hardly accepted", "dear drafts", "dear rows"],
)
def test_not_slower_than_plain(scenario: Scenario, batch: int) -> None:
    scenario = dataclasses.replace(scenario, batch=batch)
    plain = run(scenario, Fixed(), STEPS).speed()
    assert decoded(scenario).speed() >= 0.98 * plain


@pytest.mark.parametrize(
    ("batch", "undrafted"), [(4, 3), pytest.param(8, 4, marks=pytest.mark.full)]
)
def test_requests_without_drafts_do_not_wait_for_others_in_vain(batch: int, undrafted: int) -> None:
    """Which ones they are is learnt from their trees."""
    scenario = Scenario(draft_fixed=0.006, draft_by_row=0.0002, batch=batch, pads=True)
    plain = run(scenario, Fixed(), STEPS).harmonic_speed()
    assert decoded(scenario).harmonic_speed() > 1.02 * plain
    mixed = dataclasses.replace(scenario, undrafted=undrafted)
    assert decoded(mixed).harmonic_speed() >= 0.98 * plain


@pytest.mark.parametrize("late", [2, 3, 4])
def test_close_to_the_best_fixed_shape(late: int) -> None:
    scenario = Scenario()
    best = max(run(scenario, Fixed(shape), STEPS).speed(500) for shape in BEAMS)
    assert decoded(scenario, late=late).speed(500) >= 0.93 * best


def test_stops_and_comes_back_when_texts_change() -> None:
    scenario = Scenario(first=lambda step: 0.05 if 1000 <= step < 2500 else 0.75)
    result = decoded(scenario, 4000)
    assert result.drafted(500, 1000) > 0.95
    assert result.drafted(1300, 2500) < 0.1
    assert result.drafted(3000, 4000) > 0.9


def test_no_shape_is_larger_than_there_is_room_for() -> None:
    controller = ShapeController(ShapePlanner(BEAMS, FORWARDS))
    for most in (4, 0, 15, 1):
        chosen = {controller.choose(["a"], most).size for _ in range(20)}
        assert max(chosen) <= most
    assert controller.choose(["a"], 15).size > 0


def test_one_trial_is_under_way_at_a_time() -> None:
    scenario = Scenario()
    policy = Late(scenario, 3)
    run(scenario, policy, 600)
    plans = [policy.controller.choose([0], 15) for _ in range(500)]
    assert sum(plan.is_trial for plan in plans) <= 1


def test_choices_are_explained() -> None:
    controller = ShapeController(ShapePlanner(BEAMS, FORWARDS))
    plan = controller.choose(["a"], 15)
    choice = controller.take_update().choice
    assert choice is not None
    assert choice.size == plan.size > 0
    assert choice.reason == "explore"
    assert len(choice.sizes) == len(choice.tokens) == len(choice.seconds) == 12
    assert controller.take_update().choice is None
    outcome = TierOutcome(
        plan,
        ["a"],
        1 + plan.size,
        np.array([2]),
        None,
        0.05,
        ModelDrafts(np.full((1, 2), -1, np.int32), np.array([[0, -1]], np.int32), 0.01),
    )
    controller.record(outcome)
    (step,) = controller.take_update().steps
    assert (step.num_draft_tokens, step.emitted_tokens) == (plan.size, 2)
