"""Tiers that are chosen some steps ahead come near the best one, and hardly lose to plain decoding.

Closed loops on the simulated machine of `simulated_decoding`: the outcome of a step arrives when
the sizes of the two or three steps after it are settled already.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from budget_scenarios import SCENARIOS
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_decoding import Decoder, Fixed, Run, Scenario
from tier_policy import TIERS, run_tiers

from drafttree.budget.tier_controller import TierController, TierOutcome, TierPlan
from drafttree.budget.tier_explanation import RECENT, TierExplanation

STEPS = 1500
SEEDS = range(2)
MEAN_TAIL = 3 * (1 - 100**-0.5) + 100 * 100**-1.5
"""Mean duration of a stall of `simulated_decoding`, by the least."""


def on_device(batch: int, **changes: object) -> Scenario:
    """A machine whose rows are nearly free until there are many, like a GPU."""
    scenario = Scenario(
        fixed=0.01, by_row=0.00003, lookup=0.0003 / batch, noise=0.02, batch=lambda step: batch
    )
    return replace(scenario, **changes)


STATIONARY = {
    "quiet": SCENARIOS["quiet"],
    "wrong start": SCENARIOS["start"],
    "growing contexts": SCENARIOS["growing contexts"],
    "dear rows": Scenario(by_row=0.004),
    "device, batch 1": on_device(1),
    "device, batch 8": on_device(8),
    "device, batch 32": on_device(32),
    "all copies": Scenario(copies=1.0, answer=600),
    "nothing accepted": Scenario(quality=lambda step: 0.0),
    "too dear": Scenario(by_row=0.006, quality=lambda step: 0.3),
    "too many": on_device(32, by_row=0.0006, quality=lambda step: 0.4),
    "optimistic scores": Scenario(by_row=0.004, quality=lambda step: 0.3, optimism=3.0),
}


def total_speed(runs: list[Run], first: int = 0, last: int | None = None) -> float:
    """Tokens per second of all runs."""
    steps = [step for run in runs for step in run.steps[first:last]]
    return sum(step.emitted for step in steps) / sum(step.seconds for step in steps)


def fixed(scenario: Scenario, size: int, steps: int = STEPS) -> list[Run]:
    return [Decoder(scenario, seed).run(Fixed(size), steps) for seed in SEEDS]


def tiered(scenario: Scenario, late: int, steps: int = STEPS) -> list[Run]:
    return [run_tiers(scenario, steps, seed=seed, late=late)[0] for seed in SEEDS]


@pytest.mark.parametrize("late", [2, 3])
@pytest.mark.parametrize("name", STATIONARY)
def test_it_comes_near_the_best_tier_and_hardly_loses_to_plain(name: str, late: int) -> None:
    scenario = STATIONARY[name]
    # Runs of large batches take long, and vary less.
    steps = {1: STEPS, 8: 700, 32: 400}[scenario.batch(0)]
    speeds = {size: total_speed(fixed(scenario, size, steps)) for size in TIERS}
    speed = total_speed(tiered(scenario, late, steps))
    assert speed >= 0.98 * speeds[0]
    assert speed >= 0.97 * max(speeds.values())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("drafts begin to hit", {"quality": lambda step: float(step >= 800)}, 15),
        ("drafts hit no longer", {"quality": lambda step: float(step < 800)}, 0),
    ],
)
def test_it_is_back_within_100_steps_after_the_texts_change(
    name: str, before: dict[str, Callable[[int], float]], after: int
) -> None:
    scenario = replace(SCENARIOS["quiet"], **before)
    best = total_speed(fixed(scenario, after, 1200), 900)
    assert total_speed(tiered(scenario, 3, 1200), 900) >= 0.97 * best


def test_a_copy_is_followed_within_some_steps() -> None:
    """Every answer that copies is drafted with the largest tier soon after it began."""
    scenario = on_device(1, copies=0.5, answer=400)
    run, _ = run_tiers(scenario, 3000)
    large = Decoder(scenario).run(Fixed(63), 3000).tokens_per_second()
    small = Decoder(scenario).run(Fixed(15), 3000).tokens_per_second()
    assert run.tokens_per_second() > 0.97 * max(large, small)


@pytest.mark.parametrize("late", [2, 3])
def test_drafts_that_became_dear_are_left_and_taken_again(late: int) -> None:
    """A trial loses 2.5 plain steps, and 0.6% may be lost by them: so some 450 steps to return."""
    for run in tiered(SCENARIOS["dear drafts"], late, 2400):
        ends = np.cumsum([step.seconds for step in run.steps])
        became, ended = int(np.searchsorted(ends, 30)), int(np.searchsorted(ends, 60))
        assert run.rest(0, became) < 0.05
        assert run.rest(became + 20, ended) > 0.95
        plain = 1 / SCENARIOS["dear drafts"].forwards()[1]
        assert run.tokens_per_second(became, ended) > 0.93 * plain
        assert run.rest(ended + 460) < 0.05


@pytest.mark.parametrize("late", [2, 3])
def test_bursts_of_load_do_not_leave_it_at_another_tier(late: int) -> None:
    """Every 20 seconds all steps are five times slower for one second, or five steps."""
    scenario = SCENARIOS["bursts"]
    best = total_speed(fixed(scenario, 15, 3000))
    assert total_speed(tiered(scenario, late, 3000)) >= 0.95 * best


@pytest.mark.parametrize("late", [2, 3])
def test_stalls_that_only_drafts_have_are_found_out(late: int) -> None:
    """Usual steps are twice as fast with drafts, and slower on average.

    A stall lasts as long as 28 plain steps on average, and some steps stall at any size. Times are
    counted with the mean of the stalls, as the longest of a run decides on its sum.
    """
    scenario = SCENARIOS["most stalls in drafts"]
    stall = scenario.stalls * scenario.stalls_of_drafts * scenario.stall_seconds * MEAN_TAIL

    def mean_speed(first: int, last: int) -> float:
        steps = [step for run in runs for step in run.steps[first:last]]
        seconds = sum(
            scenario.fixed
            + scenario.by_row * step.rows
            + step.draft_seconds
            + stall * (step.rows > step.batch_size)
            for step in steps
        )
        return sum(step.emitted for step in steps) / seconds

    runs = [run_tiers(scenario, STEPS, seed=seed, late=late)[0] for seed in range(4)]
    plain = 1 / scenario.forwards()[1]
    assert mean_speed(0, STEPS) >= 0.84 * plain
    assert mean_speed(500, STEPS) >= 0.92 * plain


@pytest.mark.parametrize("late", [2, 3])
def test_batches_that_fill_and_drain(late: int) -> None:
    """From 1 to 32 requests and back in 400 steps: each batch size has its own best tier."""
    scenario = replace(SCENARIOS["batches"], stalls=0.0)

    def plain_seconds(batch_size: int) -> float:
        return (scenario.fixed + scenario.by_row * batch_size) * math.exp(scenario.noise**2 / 2)

    for run in tiered(scenario, late, 1200):
        # What plain decoding would take for the same tokens, at the same batch sizes.
        plain = sum(
            step.emitted / step.batch_size * plain_seconds(step.batch_size) for step in run.steps
        )
        assert plain >= 0.98 * sum(step.seconds for step in run.steps)
        few = [step for step in run.steps[400:] if step.batch_size <= 4]
        many = [step for step in run.steps[400:] if step.batch_size >= 24]
        assert sum(step.rows > step.batch_size for step in few) > 0.9 * len(few)
        assert sum(step.rows > step.batch_size for step in many) < 0.1 * len(many)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    by_row=st.floats(0.00001, 0.02),
    quality=st.floats(0.0, 1.2),
    optimism=st.floats(0.5, 3.0),
    batch=st.sampled_from([1, 3, 8, 32]),
    late=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
)
def test_it_never_loses_much_to_plain_decoding(
    by_row: float, quality: float, optimism: float, batch: int, late: int, seed: int
) -> None:
    scenario = Scenario(
        by_row=by_row,
        quality=lambda step: quality,
        optimism=optimism,
        batch=lambda step: batch,
        lookup=0.0005 / batch,
    )
    plain = Decoder(scenario, seed).run(Fixed(0), 1500).tokens_per_second()
    run, _ = run_tiers(scenario, 1500, seed=seed, late=late)
    assert run.tokens_per_second() >= 0.98 * plain


def test_trees_never_take_more_than_the_room_that_there_is() -> None:
    scenario = replace(on_device(1), batch=lambda step: 1 + step // 10 % 64)
    run, _ = run_tiers(scenario, 1300, room=256)
    for before, step in zip(run.steps, run.steps[1:], strict=False):
        # The size is chosen a step before, by the requests that there are then.
        assert step.choice.nodes + 1 <= 256 / before.batch_size
    assert {step.choice.nodes for step in run.steps} >= {0, 3, 7, 15}


def outcome(plan: TierPlan, requests: list[str], **changes: object) -> TierOutcome:
    size = TIERS.index(plan.size)
    batch = len(requests)
    expected = np.tile(1 + np.minimum(np.arange(len(TIERS)), 3.0), (batch, 1))
    known = TierOutcome(
        plan,
        requests,
        batch * (1 + plan.size),
        np.full(batch, expected[0, size] if batch else 1.0),
        expected if plan.looks_up else None,
        0.01,
    )
    return replace(known, **changes)


def test_one_trial_at_a_time_is_under_way() -> None:
    controller = TierController(TIERS, {1: 0.01, 64: 0.011})
    for _ in range(100):
        controller.record(outcome(controller.choose(["a"], 63), ["a"]))
    plans = [controller.choose(["a"], 63) for _ in range(500)]
    assert [plan.is_trial for plan in plans].count(True) == 1
    for plan in plans:
        controller.record(outcome(plan, ["a"]))
    plans = [controller.choose(["a"], 63) for _ in range(500)]
    assert [plan.is_trial for plan in plans].count(True) == 1


def test_a_trial_whose_step_was_delayed_does_not_block_others() -> None:
    controller = TierController(TIERS, {1: 0.01, 64: 0.011})
    for _ in range(100):
        controller.record(outcome(controller.choose(["a"], 63), ["a"]))
    trials = 0
    for _ in range(3000):
        plan = controller.choose(["a"], 63)
        trials += plan.is_trial
        # A prompt was in the way: the step says nothing of times and has no request of ours.
        controller.record(outcome(plan, [], seconds=None, expected=None))
    assert trials > 1


def test_requests_that_are_gone_are_forgotten_and_new_ones_are_like_the_others() -> None:
    controller = TierController(TIERS, {1: 0.01, 64: 0.011})
    for request in range(200):
        for _ in range(5):
            plan = controller.choose([str(request)], 63)
            controller.record(outcome(plan, [str(request)]))
    # One of them may be a trial.
    assert 15 in {controller.choose(["another"], 63).size for _ in range(2)}
    assert len(controller._gains) <= 1


def test_without_room_nothing_is_drafted_or_tried() -> None:
    controller = TierController(TIERS, {1: 0.01, 64: 0.011})
    for _ in range(500):
        plan = controller.choose(["a", "b"], 2)
        assert plan.size == 0
        controller.record(outcome(plan, ["a", "b"]))


def test_what_was_measured_is_explained() -> None:
    controller, explanation = TierController(TIERS, {1: 0.01, 64: 0.011}), TierExplanation()
    for _ in range(300):
        controller.record(outcome(controller.choose(["a"], 63), ["a"]))
        explanation.add(controller.take_update())
    rows = {int(row["num_draft_tokens"]): row for row in explanation.rows()}
    assert sum(row["steps"] for row in rows.values()) == 300
    assert rows[15]["steps"] > 200
    assert rows[15]["realised_tokens"] == pytest.approx(4.0)
    assert rows[15]["observed_ms"] == pytest.approx(10.0)


def test_each_choice_gives_its_reason() -> None:
    controller, explanation = TierController(TIERS, {1: 0.01, 64: 0.011}), TierExplanation()

    def reasons(most: int, steps: int) -> Counter[str]:
        for _ in range(steps):
            controller.record(outcome(controller.choose(["a"], most), ["a"]))
            explanation.add(controller.take_update())
        return Counter(row["reason"] for row in explanation.choices()[-steps:])

    assert set(reasons(63, 10)) <= {"probe", "rest", "trial", "best"}
    assert reasons(63, 60)["best"] > 50
    last = json.loads(json.dumps(explanation.choices()))[-1]
    assert len(explanation.choices()) == RECENT
    assert (last["num_draft_tokens"], last["requests"], last["most"]) == (15, 1, 63)
    assert last["tokens_0"] == 1
    assert last["tokens_15"] == pytest.approx(4.0, rel=0.05)
    assert last["ms_0"] == pytest.approx(10.0, rel=0.1)
    assert last["gain"] == pytest.approx(last["tokens_15"] * last["ms_0"] / last["ms_15"])
    # With room for 7, and then for none.
    assert reasons(7, 20)["limit"] > 15
    assert explanation.choices()[-1]["num_draft_tokens"] == 7
    assert reasons(0, 20)["limit"] > 15


def test_sizes_start_at_zero_and_ascend() -> None:
    with pytest.raises(ValueError, match="start at 0 and ascend"):
        TierController((3, 7), {1: 0.01})
