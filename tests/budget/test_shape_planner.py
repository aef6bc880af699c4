"""The planner of tree shapes finds the best one, and loses little where plain decoding is best."""

from __future__ import annotations

import dataclasses
from functools import partial
from statistics import mean
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from simulated_drafting import BEAMS, Fixed, Planned, Scenario, Step, alike, beams, run

from drafttree.budget.calibration import VerifiedDrafts
from drafttree.budget.level_acceptance import NO_DRAFTS, are_whole
from drafttree.budget.planner_state import ShapePlan
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape

STEPS = 2500
SLOW_READER = {"fixed": 0.145, "by_row": 0.002, "draft_fixed": 0.045, "draft_by_row": 0.003}
"""A quarter of the target's size, on a CPU where ten tokens take as long to read as a level."""
CHAINS = {shape for shape in BEAMS if shape.width == 1}
full = partial(pytest.param, marks=pytest.mark.full)


def over_plain(scenario: Scenario, first: int = 0, steps: int = STEPS) -> float:
    planned = run(scenario, Planned(scenario), steps).speed(first)
    return planned / run(scenario, Fixed(), steps).speed(first)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(first=lambda step: 0.1), id="hardly accepted"),
        full(Scenario(draft_fixed=0.02, draft_by_row=0.001), id="dear drafts"),
        full(Scenario(draft_fixed=0.03, reads=False), id="dear drafts, nothing to read"),
        full(Scenario(first=lambda step: 0.1, stalls=0.02), id="stalls"),
        full(Scenario(by_row=0.02, first=lambda step: 0.3), id="dear rows"),
        full(Scenario(**SLOW_READER, first=lambda step: 0.3, answer=400), id="slow to read"),
    ],
)
def test_not_slower_than_plain(scenario: Scenario, batch: int) -> None:
    assert over_plain(dataclasses.replace(scenario, batch=batch)) >= 0.98


@pytest.mark.parametrize(
    ("scenario", "least"),
    [
        pytest.param(Scenario(), 0.95, id="one request"),
        full(Scenario(first=lambda step: 0.85, further=0.1), 0.94, id="chains"),
        full(Scenario(first=lambda step: 0.4), 0.93, id="trees"),
        full(Scenario(batch=8), 0.94, id="eight requests"),
        full(Scenario(reads=False, stalls=0.01), 0.93, id="stalls"),
        pytest.param(Scenario(warm_up=3.0), 0.93, id="slow first drafts"),
    ],
)
def test_close_to_the_best_fixed_shape(scenario: Scenario, least: float) -> None:
    planned = run(scenario, Planned(scenario), STEPS)
    fixed = {shape: run(scenario, Fixed(shape), STEPS).speed(500) for shape in BEAMS}
    assert planned.speed(500) >= least * max(fixed.values())
    assert max(fixed.values()) > 1.1 * run(scenario, Fixed(), STEPS).speed(500)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(("batch", "undrafted"), [(2, 1), (4, 3), full(4, 2), full(8, 7), (8, 4)])
def test_requests_without_drafts_do_not_wait_for_others_in_vain(
    batch: int, undrafted: int, pads: bool
) -> None:
    """Where all are drafted for, drafts pay."""
    scenario = Scenario(draft_fixed=0.006, draft_by_row=0.0002, batch=batch, pads=pads)
    plain = run(scenario, Fixed(), STEPS).harmonic_speed()
    assert run(scenario, Planned(scenario), STEPS).harmonic_speed() > 1.02 * plain
    mixed = dataclasses.replace(scenario, undrafted=undrafted)
    assert run(mixed, Planned(mixed), STEPS).harmonic_speed() >= 0.98 * plain


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("undrafted", [1, full(4)])
def test_requests_are_drafted_for_beside_others_without_drafts(undrafted: int, pads: bool) -> None:
    scenario = Scenario(
        draft_fixed=0.001, draft_by_row=0.00002, batch=8, undrafted=undrafted, pads=pads
    )
    plain = run(scenario, Fixed(), STEPS).harmonic_speed()
    best = max(run(scenario, Fixed(shape), STEPS).harmonic_speed() for shape in BEAMS)
    assert best > 1.03 * plain
    assert run(scenario, Planned(scenario), STEPS).harmonic_speed(500) >= 0.95 * best


def test_plain_steps_are_tried_for_the_requests_of_the_step() -> None:
    """A trial is charged by what a step with drafts for these requests would take."""
    scenario = Scenario(draft_fixed=0.001, draft_by_row=0.00002, batch=8, undrafted=4)

    class Tried(Planned):
        shares: ClassVar[list[float]] = []

        def learn(self, shape: TreeShape, step: Step) -> None:
            assert self._plan is not None
            if self._plan.step.is_trial and not shape.depth:
                self.shares.append(self._plan.share)
            super().learn(shape, step)

    run(scenario, Tried(scenario), 1200)
    assert len(Tried.shares) > 3
    assert {*Tried.shares} == {0.5}


def test_trees_that_sampling_filters_leave_narrow_are_no_cut_ones() -> None:
    """They are accepted most, so the others alone would say too little of a shape."""
    shape = TreeShape(depth=2, width=2, nodes=4)
    planner = ShapePlanner([shape], {1: 0.03, 16: 0.03})
    parents = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, -1, 1, -1], [-1, 0, 0, -1, -1], [-1] * 5])
    sizes = torch.tensor([5, 4, 3, 1])
    trees = DraftTree(parents.int(), parents.int(), sizes.int())
    assert are_whole(shape, trees).tolist() == [True, True, False, False]
    for _ in range(200):
        plan = planner.choose(2)
        if plan.shape.depth:
            path = torch.tensor([[0, 2, -1], [0, 1, 3]])
            narrow = DraftTree(parents[:2].int(), parents[:2].int(), sizes[:2].int())
            verified = Verified(path, path, torch.tensor([2, 3]))
            planner.acceptance.add(shape, narrow, verified)
            drafts = VerifiedDrafts(np.array([4, 2]), np.array([1, 2]))
            whole = are_whole(shape, narrow)
            planner.record_step(plan, 2, 8, 0.035, 0.002, 5, drafts, whole)
        else:
            planner.record_step(plan, 2, 2, 0.03, 0.0, 2, *alike(2, 0, 2))
    plan = planner.choose(2)
    assert plan.step.calibrated == pytest.approx(2.5, rel=0.05)


def test_nothing_is_drafted_if_no_request_may_be() -> None:
    planner = ShapePlanner(BEAMS, {1: 0.03, 16: 0.03})
    assert planner.choose(2, drafted=0).shape == NO_DRAFTS
    assert planner.choose(2, drafted=1).shape != NO_DRAFTS


@pytest.mark.parametrize("seed", range(4))
def test_drafts_although_texts_are_slow_to_read(seed: int) -> None:
    scenario = Scenario(**SLOW_READER, first=lambda step: 0.8, further=0.3, answer=400)
    assert run(scenario, Planned(scenario), 600, seed).drafted(200) > 0.95


@pytest.mark.full
def test_chains_where_they_pay() -> None:
    """Rows are dear and second children hardly accepted."""
    scenario = Scenario(by_row=0.004, first=lambda step: 0.85, further=0.1)
    steps = run(scenario, Planned(scenario), STEPS).steps[-1000:]
    assert sum(step.shape in CHAINS for step in steps) >= 900


def test_stops_and_comes_back_when_texts_change() -> None:
    """Drafts are accepted, then not for 1,500 steps, and then again."""
    scenario = Scenario(first=lambda step: 0.05 if 1000 <= step < 2500 else 0.75)
    speeds = []
    for seed in range(3):
        result = run(scenario, Planned(scenario), 4000, seed)
        plain = run(scenario, Fixed(), 4000, seed)
        assert result.drafted(500, 1000) > 0.95
        assert result.drafted(1300, 2500) < 0.1
        assert result.drafted(3000, 4000) > 0.9
        speeds.append(result.speed(1000, 2500) / plain.speed(1000, 2500))
    assert mean(speeds) >= 0.955


@pytest.mark.full
def test_comes_back_when_drafts_are_cheap_again() -> None:
    scenario = Scenario(slow=lambda step: 12.0 if 800 <= step < 1800 else 1.0)
    result = run(scenario, Planned(scenario), 4500)
    assert result.drafted(1200, 1800) < 0.1
    assert result.drafted(3500, 4500) > 0.9


def test_what_a_model_has_to_read_first_delays_drafts() -> None:
    planner = ShapePlanner(BEAMS, {1: 0.03, 16: 0.03})
    assert planner.choose(1, lambda: 0.0).shape != NO_DRAFTS
    planner = ShapePlanner(BEAMS, {1: 0.03, 16: 0.03})
    assert planner.choose(1, lambda: 3.0).shape == NO_DRAFTS


@pytest.mark.parametrize("prompt", [10, 20])
@pytest.mark.parametrize("seed", [1, 2])
def test_long_prompts_are_part_of_the_price_of_drafting(prompt: float, seed: int) -> None:
    """Reading them takes longer than drafts gain, with any shape."""
    scenario = Scenario(**SLOW_READER, answer=100, prompt=prompt)
    plain = run(scenario, Fixed(), 1600, seed).speed()
    assert max(run(scenario, Fixed(shape), 800, seed).speed() for shape in BEAMS) < 0.95 * plain
    planned = run(scenario, Planned(scenario), 1600, seed)
    assert planned.speed() >= 0.9 * plain
    assert planned.drafted() > 0


@pytest.mark.parametrize("seconds", [0.3, 1.0], ids=str)
@pytest.mark.parametrize("number", [2, 3, 8])
def test_a_stall_while_drafting_is_tried_delays_it_little(number: int, seconds: float) -> None:
    """One of the first drafted steps takes as long as 10 or 33 plain steps more."""
    scenario = Scenario()

    class Stalled(Planned):
        drafted = 0

        def learn(self, shape: TreeShape, step: Step) -> None:
            self.drafted += shape.depth > 0
            if shape.depth and self.drafted == number:
                step = dataclasses.replace(
                    step,
                    seconds=step.seconds + seconds,
                    draft_seconds=step.draft_seconds + seconds,
                )
            super().learn(shape, step)

    assert run(scenario, Stalled(scenario), 900).drafted(500) > 0.95


def test_a_long_stall_while_drafting_is_tried_does_not_put_it_off_for_ever() -> None:
    """Half an hour, as if the machine had been suspended."""
    planner, tried = ShapePlanner(BEAMS, {1: 0.03, 16: 0.03}), []
    for step in range(6000):
        plan = planner.choose(1)
        # The first drafts of a depth are not measured.
        stalls = bool(plan.shape.depth) and len(tried) == 1
        if plan.shape.depth:
            tried.append(step)
        seconds = 1800.0 if stalls else 0.04
        nodes = plan.shape.nodes
        planner.record_step(plan, 1, 1 + nodes, seconds, 0.01, 1.0, *alike(1, nodes, 1.0))
    assert tried[2] - tried[1] < 5000


def test_drafting_is_tried_again_after_a_reset() -> None:
    """New weights may have other drafts accepted."""
    planner = ShapePlanner(BEAMS, {1: 0.03, 16: 0.03})

    def drafted(steps: int) -> int:
        count = 0
        for _ in range(steps):
            plan = planner.choose(1, lambda: 0.1)
            count += plan.shape.depth > 0
            # Nothing is accepted, and drafting takes as long as a plain step.
            seconds = 0.06 if plan.shape.depth else 0.03
            if plan.shape.depth:
                verified = Verified(
                    torch.full((1, 6), -1).index_fill(1, torch.tensor([0]), 0),
                    *2 * [torch.empty(0)],
                )
                planner.acceptance.add(plan.shape, beams(plan.shape, 1), verified)
            nodes = plan.shape.nodes
            planner.record_step(
                *(plan, 1, 1 + nodes, seconds, seconds - 0.03, 1.0), *alike(1, nodes, 1.0)
            )
        return count

    drafted(400)
    before = drafted(40)
    planner.reset()
    assert drafted(40) > before + 1


def test_drafts_do_not_seem_free_where_no_step_is_measured() -> None:
    """Each step reads a part of a prompt, for example. Drafting takes longer than it saves."""

    class Unmeasured(Planned):
        def learn(self, shape: TreeShape, step: Step) -> None:
            if shape.depth:
                verified = Verified(torch.from_numpy(step.paths), *2 * [torch.empty(0)])
                self.planner.acceptance.add(shape, step.trees, verified)

    scenario = Scenario(draft_fixed=0.02, draft_by_row=0.001)
    assert run(scenario, Unmeasured(scenario), 600).drafted(200) < 0.05


def test_shapes_are_a_function_of_what_was_before() -> None:
    """The same outcomes and times give the same shapes."""
    scenario = Scenario(stalls=0.01)
    first, second = (run(scenario, Planned(scenario), 300) for _ in range(2))
    assert [step.shape for step in first.steps] == [step.shape for step in second.steps]
    assert len(first.shapes()) > 2


def test_a_decision_to_draft_holds_for_four_steps_of_the_same_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner, decided = ShapePlanner(BEAMS, {1: 0.03, 16: 0.03}), []
    expected_tokens = planner.acceptance.expected_tokens

    def counted(*args: Any) -> Any:
        decided.append(True)
        return expected_tokens(*args)

    monkeypatch.setattr(planner.acceptance, "expected_tokens", counted)

    def step(requests: int = 1, most: int | None = None) -> tuple[ShapePlan, bool]:
        """A plan, and whether it was decided now; as many tokens are accepted as there can be."""
        decided.clear()
        plan = planner.choose(requests, most=most)
        path = torch.arange(6)[None].masked_fill(torch.arange(6) > plan.shape.depth, -1)
        if plan.shape.depth:
            planner.acceptance.add(
                plan.shape, beams(plan.shape, 1), Verified(path, *2 * [torch.empty(0)])
            )
        rows, emitted = requests * (1 + plan.shape.nodes), requests * (1.0 + plan.shape.depth)
        verified = alike(requests, plan.shape.nodes, emitted)
        planner.record_step(plan, requests, rows, 0.035, 0.005, emitted, *verified)
        return plan, bool(decided)

    steps = [step() for _ in range(400)]
    last = max(at for at, (_, is_new) in enumerate(steps[:-4]) if is_new)
    plan, *_ = steps[last]
    assert plan.shape.depth
    assert [each is plan for each, _ in steps[last : last + 5]] == [True] * 4 + [False]
    while not step()[1]:
        pass
    assert not step()[1]
    assert step(requests=2)[1]  # a decision for one request says nothing of two
    while not step()[1]:
        pass
    assert step(most=1)[0].shape.nodes <= 1


@pytest.mark.parametrize("shapes", [BEAMS[::-1], BEAMS[:2] + BEAMS[1:]])
def test_shapes_must_ascend(shapes: tuple[TreeShape, ...]) -> None:
    with pytest.raises(ValueError, match="must start at 0 and ascend"):
        ShapePlanner(shapes, {1: 0.03})


@pytest.mark.parametrize("seed", range(3))
def test_one_slow_plain_step_does_not_let_drafts_seem_to_pay(seed: int) -> None:
    """The first plain step of eight requests is delayed; before, drafts paid with one request.

    A draft then costs more than it gives, which was not noticed for hundreds of steps.
    """
    planner = ShapePlanner([TreeShape(1, 1, 1)], {1: 0.02, 2: 0.02, 8: 0.0205, 16: 0.0245})
    random = torch.Generator().manual_seed(seed)

    def drafts(batch: int, plain: float, drafted: float) -> bool:
        plan = planner.choose(batch)
        accepted = torch.rand(batch, generator=random) < 0.4 * plan.shape.depth
        if plan.shape.depth:
            path = torch.stack((torch.zeros(batch).long(), accepted.long() * 2 - 1), 1)
            verified = Verified(path, path, 1 + accepted.int())
            planner.acceptance.add(plan.shape, beams(plan.shape, batch), verified)
        planner.record_step(
            *(plan, batch, batch * (1 + plan.shape.nodes)),
            *(drafted if plan.shape.depth else plain, 0.003 * plan.shape.depth),
            batch + int(accepted.sum()),
            VerifiedDrafts(np.full(batch, plan.shape.nodes), accepted.double().numpy()),
            np.full(batch, plan.shape.nodes > 0),
        )
        return plan.shape.depth > 0

    assert sum(drafts(1, 0.022, 0.025) for _ in range(100)) > 90
    of_eight: list[bool] = []
    for _ in range(200):
        of_eight.append(drafts(8, 0.024 if False in of_eight else 0.047, 0.0414))
    assert not any(of_eight[40:100])
    assert sum(of_eight) < 40
