"""The planner finds the best size and never loses much to plain decoding.

A simulated machine follows synthetic cost curves. The planner sees noisy times and sampled tokens;
the score counts true times and expected tokens, so that no result depends on a lucky sample.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafttree.budget.calibration import AcceptanceCalibration, VerifiedDrafts
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import CostModel, batch_bucket
from drafttree.budget.planner import Planner
from drafttree.budget.tree_choice import TreeChoice

CPU = (0, 3, 7, 11, 15, 23, 31, 47, 63, 80)
CUDA = (0, 3, 7, 15, 31, 80)
MEASURED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81, 128, 256)

Cost = Callable[[int, int], float]


def memory_bound(batch: int, n: int) -> float:
    return 0.02 * max(1.0, math.pow(batch * (n + 1) / 64, 0.7))


def compute_bound(batch: int, n: int) -> float:
    return 0.005 * batch * (n + 1)


def stepwise(batch: int, n: int) -> float:
    return 0.01 + 0.003 * math.ceil(batch * (n + 1) / 8)


def linear(by_row: float) -> Cost:
    return lambda batch, n: 0.02 + by_row * batch * (n + 1)


def between(batch: int, n: int) -> float:
    return linear(0.0008)(batch, n)


def gain_of(n: int, quality: float = 1.0) -> float:
    """Expected tokens of a request with `n` draft tokens: each adds less than the one before."""
    return 1 + quality * 1.9 * (1 - math.exp(-((n / 14) ** 0.7)))


@dataclass
class Machine:
    """A simulated machine and the texts that it decodes.

    Attributes:
        cost: Seconds of a step at (batch, n) without the drafter's time.
        wasted: Time of looking up drafts that are not used, as a share of a plain step.
        draft: Time of drafting for a step that verifies drafts, as a share of a plain step.
        quality: Scale of the tokens that drafts add.
        sway: Standard deviation of the logarithm of `quality` from step to step.
        optimism: Ratio of expected to true acceptance.
        noise: Standard deviation of a step's time.
        outliers: Whether one step in 50 takes five times as long.
        slow: Factor on the time of all steps.
        draft_cost: Factor on the time of steps with drafts.
        delays: Factor on the measured time of the next step without drafts, or with them.
    """

    cost: Cost
    wasted: float = 0.03
    draft: float = 0.05
    quality: float = 1.0
    sway: float = 0.0
    optimism: float = 1.0
    noise: float = 0.02
    outliers: bool = False
    slow: float = 1.0
    draft_cost: float = 1.0
    delays: dict[bool, float] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def true_seconds(self, batch: int, n: int, drafted: bool) -> float:
        plain = self.cost(batch, 0)
        if n == 0:
            return self.slow * plain * (1 + self.wasted * drafted)
        return self.slow * self.draft_cost * (self.cost(batch, n) + self.draft * plain)

    def forwards(self, off: Callable[[int], float] = lambda tokens: 1.0) -> dict[int, float]:
        return {t: self.cost(1, t - 1) * off(t) for t in MEASURED}

    def rate(self, batch: int, n: int) -> float:
        """Tokens per second of a request at a fixed `n`."""
        return gain_of(n, self.quality) / self.true_seconds(batch, n, drafted=False)

    def seen(self, n: int, seconds: float) -> float:
        seconds *= max(0.3, 1 + self.noise * self.rng.standard_normal())
        seconds *= self.delays.pop(n > 0, 1.0)
        return seconds * (5 if self.outliers and self.rng.random() < 0.02 else 1)


@dataclass
class Score:
    """Totals of a run, in true seconds and expected tokens."""

    tokens: float = 0.0
    seconds: float = 0.0
    plain: float = 0.0
    best: float = 0.0
    sizes: list[int] = field(default_factory=list)

    @property
    def over_plain(self) -> float:
        """Speedup over plain decoding."""
        return self.plain / self.seconds

    @property
    def over_best(self) -> float:
        """Speedup over the best fixed size."""
        return self.best / self.seconds

    def mostly(self, last: int = 500) -> int:
        return Counter(self.sizes[-last:]).most_common(1)[0][0]

    def share(self, n: int, first: int, last: int) -> float:
        return self.sizes[first:last].count(n) / (last - first)


def play(
    machine: Machine,
    planner: Planner,
    steps: int,
    batch: Callable[[int], int] | int = 1,
    late: int = 0,
) -> Score:
    """Run steps; `plain` and `best` are the seconds for the same tokens at a fixed size.

    With `late` outcomes as many further steps are chosen before one of them is recorded.
    """
    score = Score()
    outcomes: deque[tuple[int, TreeChoice, int, float, float, int]] = deque()
    for step in range(steps):
        b = batch if isinstance(batch, int) else batch(step)
        quality = machine.quality * math.exp(machine.sway * machine.rng.standard_normal())
        drafted = not planner.should_skip_drafting(b)
        n = 0
        if drafted:
            gains = [gain_of(m, quality * machine.optimism) for m in planner.candidate_sizes]
            n = planner.choose(b, np.array([gains] * b))
        seconds = machine.true_seconds(b, n, drafted)
        gain = gain_of(n, quality)
        emitted = b + (int(machine.rng.binomial(8 * b, min(1.0, (gain - 1) / 8))) if n else 0)
        draft_seconds = machine.slow * machine.wasted * machine.cost(b, 0) if drafted else 0.0
        outcomes.append(
            (b, TreeChoice(n), b * (n + 1), machine.seen(n, seconds), draft_seconds, emitted)
        )
        if len(outcomes) > late:
            planner.record_step(*outcomes.popleft())
        score.sizes.append(n)
        score.seconds += seconds
        score.tokens += b * gain
        score.plain += gain / machine.rate(b, 0)
        score.best += gain / max(machine.rate(b, m) for m in planner.candidate_sizes)
    return score


@pytest.mark.parametrize("cost", [memory_bound, stepwise, between, compute_bound])
@pytest.mark.parametrize("noisy", [False, True], ids=["quiet", "noisy"])
@pytest.mark.parametrize("late", [0, 1])
def test_it_comes_near_the_best_fixed_size(cost: Cost, noisy: bool, late: int) -> None:
    machine = Machine(cost, noise=0.1 if noisy else 0.02, outliers=noisy)
    score = play(machine, Planner(CPU, machine.forwards(), late=late), 2000, late=late)
    assert score.over_plain >= 0.98
    assert score.over_best >= (0.95 if noisy else 0.97)


def test_on_an_idle_machine_it_takes_many_nodes() -> None:
    machine = Machine(memory_bound)
    assert play(machine, Planner(CUDA, machine.forwards()), 400).mostly(200) >= 31
    assert play(machine, Planner(CUDA, machine.forwards()), 400, batch=32).mostly(200) <= 7


def test_where_each_token_costs_it_settles_at_plain() -> None:
    machine = Machine(compute_bound, wasted=0.2)
    score = play(machine, Planner(CPU, machine.forwards()), 3000, batch=8)
    assert score.over_plain >= 0.99
    assert score.share(0, 500, 3000) > 0.99


def test_tokens_up_to_the_next_step_of_the_costs_are_used() -> None:
    machine = Machine(stepwise)
    assert play(machine, Planner(CPU, machine.forwards()), 500).mostly(200) in (7, 15, 23)


@pytest.mark.parametrize("cost", [between, compute_bound])
def test_overestimated_acceptance_costs_little(cost: Cost) -> None:
    machine = Machine(cost, optimism=2.0, quality=0.25, draft=0.1)
    score = play(machine, Planner(CPU, machine.forwards()), 3000, batch=4)
    assert machine.rate(4, 0) == max(machine.rate(4, n) for n in CPU)
    assert score.over_plain >= 0.99
    assert score.mostly() == 0


@pytest.mark.parametrize("off", [0.5, 2.0])
@pytest.mark.parametrize("beyond", [0, 4])
@pytest.mark.parametrize("cost", [memory_bound, between, compute_bound])
def test_wrong_measurements_at_start_are_put_right(cost: Cost, beyond: int, off: float) -> None:
    """All forwards, or only the larger ones, were measured at half or twice their true cost."""
    machine = Machine(cost, noise=0.05)
    planner = Planner(CPU, machine.forwards(lambda tokens: off if tokens > beyond else 1.0))
    score = play(machine, planner, 2000)
    assert score.over_plain >= 0.98
    assert score.over_best >= 0.93


def test_gains_are_followed_from_step_to_step() -> None:
    machine = Machine(between, sway=0.8)
    assert play(machine, Planner(CPU, machine.forwards()), 1500).over_best > 1.02


def test_a_machine_that_slows_down_for_everything_does_not_flip_the_choice() -> None:
    machine = Machine(between, noise=0.05, outliers=True)
    planner = Planner(CPU, machine.forwards())
    before = play(machine, planner, 600)
    machine.slow = 2.0
    after = play(machine, planner, 600)
    assert {before.mostly(300), after.mostly(300)} <= {7, 11}  # as good as equal
    assert after.share(0, 0, 600) < 0.1
    assert after.over_best >= 0.95
    for step in range(8):
        machine.slow = 2.0 * 1.1**step
        after = play(machine, planner, 100)
        assert after.share(0, 0, 100) < 0.2


@pytest.mark.parametrize("batch", [1, 8])
def test_it_stops_drafting_that_became_expensive_and_resumes_when_cheap(batch: int) -> None:
    machine = Machine(memory_bound, noise=0.05)
    planner = Planner(CPU, machine.forwards())
    assert play(machine, planner, 600, batch).share(0, 300, 600) < 0.05
    machine.draft_cost = 4.0
    expensive = play(machine, planner, 2000, batch)
    assert expensive.over_plain >= 0.98
    assert expensive.share(0, 100, 2000) > 0.97
    machine.draft_cost = 1.0
    cheap = play(machine, planner, 800, batch)
    assert cheap.share(0, 500, 800) < 0.05


@pytest.mark.parametrize(
    ("before", "after"), [(0.0003, 0.002), (0.002, 0.0003), (0.0008, 0.003), (0.003, 0.0008)]
)
def test_it_follows_the_cost_of_a_row(before: float, after: float) -> None:
    """Contexts become longer or shorter, and with them the cost of each row."""
    machine = Machine(linear(before), noise=0.05)
    planner = Planner(CPU, machine.forwards())
    play(machine, planner, 600)
    machine.cost = linear(after)
    play(machine, planner, 100)
    assert play(machine, planner, 300).over_best >= 0.92
    assert play(machine, planner, 300).over_best >= 0.95


def test_it_comes_back_when_drafts_begin_to_hit() -> None:
    machine = Machine(between, quality=0.0)
    planner = Planner(CPU, machine.forwards())
    assert play(machine, planner, 2000).over_plain >= 0.98
    machine.quality = 1.0
    assert play(machine, planner, 500).share(0, 300, 500) < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_the_first_plain_step_for_long_is_delayed(seed: int) -> None:
    """Drafts are accepted less often. Against such a plain step, they still seem to pay."""
    machine = Machine(linear(0.004), quality=2.0, noise=0.05, rng=np.random.default_rng(seed))
    planner = Planner(CPU, machine.forwards())
    assert play(machine, planner, 600).share(0, 100, 600) < 0.02
    machine.quality, machine.delays[False] = 0.7, 3.0
    assert play(machine, planner, 1200).over_plain >= 0.97
    assert not machine.delays


def test_plain_decoding_is_tried_again_after_a_stall_in_such_a_trial() -> None:
    """Plain steps then seem to take longer than steps with drafts, and a trial to cost more."""
    machine = Machine(linear(0.0004), quality=0.5, noise=0.03)
    planner = Planner((0, 3, 7, 15), machine.forwards())
    play(machine, planner, 200)
    machine.delays[False] = 60.0
    play(machine, planner, 100)
    assert not machine.delays
    assert play(machine, planner, 1200).sizes.count(0) >= 2


def test_nothing_is_tried_while_no_step_is_recorded() -> None:
    """Trials would never be charged, so that each step would be one."""
    machine = Machine(linear(0.0004))
    planner = Planner((0, 3, 7, 15), machine.forwards())
    assert play(machine, planner, 500, late=500).share(15, 50, 500) == 1
    assert len(set(play(machine, planner, 500).sizes)) > 1


@pytest.mark.parametrize("seed", range(3))
def test_the_first_drafted_step_for_long_is_delayed(seed: int) -> None:
    machine = Machine(linear(0.0004), quality=0.0, noise=0.05, rng=np.random.default_rng(seed))
    planner = Planner(CPU, machine.forwards())
    assert play(machine, planner, 1500).share(0, 200, 1500) == 1
    machine.quality, machine.delays[True] = 0.6, 3.0
    assert play(machine, planner, 1200).over_best >= 0.975
    assert not machine.delays


@pytest.mark.parametrize("period", [1, 7, 300])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
def test_batches_that_come_and_go(cost: Cost, period: int) -> None:
    scores = []
    for seed in range(4):
        machine = Machine(cost, noise=0.05, outliers=True, rng=np.random.default_rng(seed))
        planner = Planner(CPU, machine.forwards())
        scores.append(
            play(machine, planner, 2400, batch=lambda step: (1, 8, 32)[step // period % 3])
        )
    assert min(score.over_plain for score in scores) >= 0.98
    assert mean(score.over_best for score in scores) >= 0.94


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    flat=st.floats(0.0, 1.0),
    draft=st.floats(0.0, 1.0),
    wasted=st.floats(0.0, 0.3),
    quality=st.floats(0.0, 1.2),
    optimism=st.floats(0.5, 3.0),
    batch=st.sampled_from([1, 3, 8, 32]),
    seed=st.integers(0, 1000),
)
# The first plain step was delayed so much that drafts, which gain nothing here, seemed to pay.
@example(
    flat=0.8513, draft=0.714, wasted=0.2137, quality=0.0076, optimism=2.4767, batch=3, seed=287
)
def test_it_never_loses_much_to_plain_decoding(
    flat: float, draft: float, wasted: float, quality: float, optimism: float, batch: int, seed: int
) -> None:
    machine = Machine(
        lambda b, n: 0.02 * (flat + (1 - flat) * b * (n + 1) / 16 + 0.01),
        wasted=wasted,
        draft=draft,
        quality=quality,
        optimism=optimism,
        sway=0.3,
        noise=0.1,
        outliers=True,
        rng=np.random.default_rng(seed),
    )
    assert play(machine, Planner(CPU, machine.forwards()), 1500, batch).over_plain >= 0.98


@pytest.mark.parametrize(("wasted", "share"), [(0.002, 1.0), (0.02, 0.25), (0.2, 0.025)])
def test_wasted_drafting_takes_its_share_of_the_time(wasted: float, share: float) -> None:
    machine = Machine(compute_bound, wasted=wasted, noise=0.0)
    planner = Planner(CPU, machine.forwards())
    probes = 0
    for step in range(2000):
        drafted = not planner.should_skip_drafting(8)
        if drafted:
            assert planner.choose(8, np.ones((8, len(CPU)))) == 0
        seconds = machine.true_seconds(8, 0, drafted)
        draft_seconds = wasted * machine.cost(8, 0) * drafted
        planner.record_step(8, TreeChoice(0), 8, seconds, draft_seconds, 8)
        probes += drafted and step >= 500
    assert probes / 1500 == pytest.approx(share, rel=0.2)


def test_a_text_that_repeats_itself_now_and_then_is_found_out() -> None:
    """Each row costs nearly half a plain step, so drafts pay only while copies are accepted."""
    machine = Machine(lambda b, n: 0.03 * b * (1 + 0.45 * n), wasted=0.007, draft=0.01)
    planner = Planner(CPU, machine.forwards())
    new, copies = Score(), Score()
    for _ in range(12):
        for quality, steps, total in ((0.8, 150, new), (5.0, 24, copies)):
            machine.quality = quality
            score = play(machine, planner, steps)
            total.plain += score.plain
            total.seconds += score.seconds
    assert new.over_plain >= 0.98
    assert copies.over_plain >= 1.4


def two_cores(batch: int, n: int) -> float:
    """Cost as measured on two cores: a step hardly gets cheaper as requests leave the batch."""
    return 0.035 + 0.0006 * batch + 0.00075 * batch * n


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_requests_that_copy_do_not_make_all_others_wait(batch: int) -> None:
    """All answers of a batch have the same length, and it ends with the slowest request."""
    machine = Machine(two_cores, wasted=0.01)
    planner = Planner((0, 3), machine.forwards())
    spent = plain = 0.0
    for _ in range(30):
        quality = np.where(np.arange(batch) < batch // 3, 5.0, 0.4)
        left = np.full(batch, 60.0)
        plain += 60 * machine.cost(batch, 0)
        while (left > 0).any():
            here = left > 0
            b, drafted = int(here.sum()), not planner.should_skip_drafting(int(here.sum()))
            tokens = np.array([[1.0, gain_of(3, each)] for each in quality[here]])
            n = planner.choose(b, tokens) if drafted else 0
            emitted = tokens[:, 1] if n else np.ones(b)
            seconds = machine.true_seconds(b, n, drafted)
            draft_seconds = machine.wasted * machine.cost(b, 0) * drafted
            planner.record_step(
                b,
                TreeChoice(n),
                b * (n + 1),
                machine.seen(n, seconds),
                draft_seconds,
                round(float(emitted.sum())),
            )
            left[here] -= emitted
            spent += seconds
    assert plain / spent >= 0.98


def test_the_same_steps_make_the_same_choices() -> None:
    scores = []
    for _ in range(2):
        machine = Machine(between, noise=0.1, outliers=True, sway=0.3)
        scores.append(play(machine, Planner(CPU, machine.forwards()), 400))
    assert scores[0] == scores[1]


def test_explain_gives_predictions_and_measurements_by_size() -> None:
    machine = Machine(memory_bound, noise=0.0)
    planner = Planner(CUDA, machine.forwards(lambda tokens: 2.0))
    score = play(machine, planner, 300, batch=lambda step: 1 if step < 200 else 8)
    rows = json.loads(json.dumps(planner.explain()))
    assert [(row["batch"], row["num_draft_tokens"]) for row in rows] == sorted(
        {(1 if step < 200 else 8, n) for step, n in enumerate(score.sizes)}
    )
    assert sum(row["steps"] for row in rows) == 300
    for row in rows:
        seconds = machine.true_seconds(row["batch"], row["num_draft_tokens"], drafted=False)
        assert row["observed_ms"] == pytest.approx(1e3 * seconds, rel=0.05)
        assert row["tokens_per_second"] == pytest.approx(
            row["batch"] * row["realised_tokens"] / row["observed_ms"] * 1e3
        )
    top = max((row for row in rows if row["batch"] == 1), key=lambda row: row["steps"])
    assert top["num_draft_tokens"] == score.mostly(300)
    assert top["realised_tokens"] == pytest.approx(gain_of(top["num_draft_tokens"]), rel=0.1)
    assert top["expected_tokens"] == pytest.approx(top["realised_tokens"], rel=0.1)


def test_buckets_are_powers_of_two() -> None:
    assert [batch_bucket(b) for b in (1, 2, 3, 5, 6, 8, 11, 12, 31, 33)] == [
        *(1, 2, 4, 4, 8, 8, 8, 16, 32, 32)
    ]


def test_samples_of_one_size_carry_over_to_its_neighbours() -> None:
    costs = CostModel((0, 7, 15), {1: 1.0, 1000: 1.0})
    for _ in range(20):
        costs.observe(1, 1, 1.0)
        costs.observe(1, 16, 1.5)
    assert costs.seconds(1, 1) == pytest.approx(1.0, rel=0.02)
    assert costs.seconds(1, 16) == pytest.approx(1.5, rel=0.02)
    assert 1.2 < costs.seconds(1, 8) < 1.5
    assert costs.seconds(1, 12) == pytest.approx(
        math.sqrt(costs.seconds(1, 8) * costs.seconds(1, 16)), rel=1e-3
    )
    for size in range(3):
        assert costs.of_sizes(1)[size] == pytest.approx(costs.seconds(1, (1, 8, 16)[size]))
        assert costs.seconds(32, 32 * (1, 8, 16)[size]) == pytest.approx(costs.of_sizes(1)[size])
    deviations = costs.deviations(1, 2)
    assert deviations[2] == 0
    assert deviations[1] > deviations[0]


def test_one_slow_step_changes_little_and_many_change_the_estimate() -> None:
    costs = CostModel((0, 15), {1: 1.0, 1000: 1.0})
    for _ in range(10):
        costs.observe(1, 1, 1.0)
    for _ in range(60):
        costs.observe(1, 16, 1.5)
    costs.observe(1, 16, 7.5)
    assert costs.seconds(1, 16) == pytest.approx(1.5, rel=0.15)
    known = costs.deviations(1, 1)[0]
    for _ in range(10):
        costs.observe(1, 16, 3.0)
    assert costs.seconds(1, 16) == pytest.approx(3.0, rel=0.1)
    assert 1.3 < costs.seconds(1, 1) < 2.2
    assert costs.deviations(1, 1)[0] > 1.5 * known
    for _ in range(4):
        costs.observe(1, 1, 1.0)
    assert costs.seconds(1, 1) == pytest.approx(1.0, rel=0.1)
    costs.observe(1, 16, 3.0)
    assert costs.seconds(1, 16) == pytest.approx(3.0, rel=0.1)


def test_stalls_count_with_their_mean() -> None:
    """One step in ten takes six times as long: 1.5 on average."""
    costs = CostModel((0, 15), {1: 1.0, 16: 1.0})
    for step in range(1000):
        costs.observe(1, 16, 6.0 if step % 10 == 5 else 1.0)
        if step % 5 == 0:
            costs.observe(1, 1, 1.0)
    assert costs.seconds(1, 16) == pytest.approx(1.5, rel=0.1)
    assert costs.seconds(1, 1) == pytest.approx(1.0, rel=0.1)


def test_what_is_asked_for_twice_follows_every_step() -> None:
    asked, other = (CostModel((0, 3, 7), {1: 1.0, 8: 1.7, 64: 4.0}) for _ in range(2))
    for costs in (asked, other):
        assert costs.of_sizes(1)[0] < costs.of_sizes(4)[0]
    for step in range(40):
        for batch_size in (1, 4):
            for _ in range(2):
                asked.of_sizes(batch_size)[:] = 0.0  # the caller may change it
        rows, added = 4 * (1, 4, 8)[step % 3], 3 * (step > 20)
        for costs in (asked, other):
            costs.observe(4, rows, 1.0 + 0.1 * rows + 0.02 * step, added)
    assert asked.of_sizes(4).tolist() == other.of_sizes(4).tolist()
    assert asked.of_sizes(1).tolist() == other.of_sizes(1).tolist()
    assert asked.seconds(4, 16) == other.seconds(4, 16)


def test_ratios_follow_every_outcome() -> None:
    calibration = AcceptanceCalibration((0, 4), BudgetConstants())
    groups = np.array([0, 2, 0])
    assert calibration.ratios(groups, 5).tolist() == 3 * [[1.0, 1.0]]
    calibration.add(groups, 4, np.full(3, 2.0), np.array([1.0, 2.0, 1.0]), 5)
    less, same, again = calibration.ratios(groups, 5)[:, 1].tolist()
    assert less == again < same <= 1
    # Without further outcomes they return to 1.
    assert less < calibration.ratios(groups, 5000)[0, 1] < 1


def test_errors_name_what_was_given() -> None:
    costs = CostModel((0, 3), {1: 1.0})
    with pytest.raises(ValueError, match="forward_seconds"):
        CostModel((0, 3), {})
    with pytest.raises(ValueError, match="forward_seconds"):
        CostModel((0, 3), {1: 0.0})
    with pytest.raises(ValueError, match="seconds=0"):
        costs.observe(1, 1, 0)
    with pytest.raises(ValueError, match="batch_size=0"):
        costs.seconds(0, 0)
    with pytest.raises(ValueError, match="start at 0 and ascend"):
        Planner((7, 15), {1: 1.0})
    with pytest.raises(ValueError, match="start at 0 and ascend"):
        Planner((0, 15, 7), {1: 1.0})
    with pytest.raises(ValueError, match="2 columns: give one for each of the 6"):
        Planner(CUDA, {1: 1.0}).choose(1, np.array([[1.0, 2.0]]))
    with pytest.raises(ValueError, match="2 columns: give one for each of the 80 nodes"):
        Planner(CUDA, {1: 1.0}).choose_best_first(1, np.array([[1.0, 0.5]]))


def test_nothing_is_drafted_where_there_is_nothing_to_draft() -> None:
    planner = Planner((0, 3, 7), {1: 2.0, 4: 1.0, 8: 1.1})
    for _ in range(20):
        if not planner.should_skip_drafting(1):
            assert planner.choose(1, np.ones((1, 3))) == 0
        planner.record_step(1, TreeChoice(0), 1, 2.0, 0.0, 1)
    assert planner.choose(1, np.array([[1.0, 1.5, 1.5]])) in (0, 3)


def test_steps_that_are_always_truncated_cannot_lose_for_long() -> None:
    """Trees are truncated near the end of requests, so that no size is ever measured."""
    planner = Planner((0, 7), {1: 1.0, 8: 1.0})
    lost = 0.0
    for _ in range(2000):
        if planner.should_skip_drafting(1) or planner.choose(1, np.array([[1.0, 3.0]])) == 0:
            planner.record_step(1, TreeChoice(0), 1, 1.0, 0.0, 1)
        else:
            planner.record_step(1, TreeChoice(7), 4, 3.0, 0.0, 1)
            lost += 2.0
    assert 0 < lost < 0.02 * 2000


def outcomes(draft_tokens: list[int], accepted: list[int]) -> VerifiedDrafts:
    return VerifiedDrafts(np.array(draft_tokens), np.array(accepted))


def test_what_is_accepted_of_guesses_says_little_of_copies() -> None:
    planner = Planner((0, 3, 7), {1: 1.0, 1000: 1.0})
    guess, copy = [0.3] + 6 * [0.2], 7 * [0.95]
    for _ in range(40):
        choice = planner.choose_best_first(2, np.array([guess, copy], np.float32))
        nodes = choice.num_draft_tokens + choice.spine
        verified = outcomes([nodes, nodes], [0, nodes])
        planner.record_step(*(2, choice, 2 + 2 * nodes, 1.0, 0.0, 2.0 + nodes), verified=verified)
    expected = planner.expected_tokens(np.array([guess, copy], np.float32))
    of_guess, of_copy = (planner.calibrate(expected) - 1)[:, 2] / (expected - 1)[:, 2]
    assert of_guess < 0.4
    assert of_copy > 0.95


@pytest.mark.parametrize("extends", [True, False])
def test_trees_that_the_host_cut_say_nothing_of_acceptance(extends: bool) -> None:
    planner = Planner((0, 3, 7), {1: 1.0, 1000: 1.0})
    # The third tree has no more than four nodes.
    scores = np.array([7 * [0.9], 7 * [0.9], 4 * [0.9] + 3 * [0.0]], np.float32)
    for _ in range(20):
        choice = planner.choose_best_first(3, scores, extends=extends)
        assert choice.num_draft_tokens + choice.spine == 7
        step = (3, choice, 3 + 12, 1.0, 0.0, 3 + 5.6)
        planner.record_step(*step, verified=outcomes([7, 1, 4], [6, 0, 0]))
    expected = planner.expected_tokens(scores)
    ratios = (planner.calibrate(expected) - 1)[:, 2] / (expected - 1)[:, 2]
    # 6 of 6.3, and 0 of 3.6: with the second request it would be 6 of 16.2.
    assert ratios == pytest.approx(np.full(3, 0.49), abs=0.08)


def test_of_other_requests_scores_the_mean_is_expected() -> None:
    planner = Planner((0, 3, 7), {1: 1.0, 1000: 1.0})
    scores = np.array([7 * [0.9], 7 * [0.9]], np.float32)
    for _ in range(40):
        choice = planner.choose_best_first(3, scores)
        assert choice.num_draft_tokens == 7
        step = (3, choice, 3 + 21, 1.0, 0.0, 3 + 9)
        planner.record_step(*step, verified=outcomes([7, 7, 7], [3, 3, 3]))
    expected = planner.expected_tokens(scores)
    ratios = (planner.calibrate(expected) - 1)[:, 2] / (expected - 1)[:, 2]
    assert ratios == pytest.approx(np.full(2, 3 / 6.3), abs=0.05)


def test_a_copy_that_breaks_off_counts_as_few_outcomes() -> None:
    planner = Planner((0, 63), {1: 1.0, 1000: 1.0})
    scores = np.full((1, 63), 0.98, np.float32)
    choice = planner.choose_best_first(1, scores)
    assert choice.num_draft_tokens == 63
    planner.record_step(1, choice, 64, 1.0, 0.0, 1.0, verified=outcomes([63], [0]))
    expected = planner.expected_tokens(scores)
    assert 0.5 < (planner.calibrate(expected) - 1)[0, 1] / (expected - 1)[0, 1] < 0.9
