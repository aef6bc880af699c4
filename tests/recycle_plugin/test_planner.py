"""The planner finds the rung that pays, and never loses much to plain decoding.

A simulated machine plays synthetic cost curves. The planner sees noisy times and drawn tokens;
its score counts true times and expected tokens, so no figure here hangs on the luck of a draw.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_plugin.costs import Costs, bucket_of
from recycle_plugin.planner import Planner

CPU = (0, 3, 7, 11, 15, 23, 31, 47, 63, 80)
CUDA = (0, 7, 15, 31, 80)
MEASURED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81, 128, 256)

Cost = Callable[[int, int], float]


def memory_bound(batch: int, n: int) -> float:
    return 0.02 * max(1.0, (batch * (n + 1) / 64) ** 0.7)


def compute_bound(batch: int, n: int) -> float:
    return 0.005 * batch * (n + 1)


def stepwise(batch: int, n: int) -> float:
    return 0.01 + 0.003 * math.ceil(batch * (n + 1) / 8)


def between(batch: int, n: int) -> float:
    return 0.02 + 0.0008 * batch * (n + 1)


def gain_of(n: int, quality: float = 1.0) -> float:
    """Expected tokens of a request with `n` nodes: ever less for each further node."""
    return 1 + quality * 1.9 * (1 - math.exp(-((n / 14) ** 0.7)))


@dataclass
class Machine:
    """A machine with its costs and texts.

    Attributes:
        cost: seconds of a step at (batch, n) without the drafter's work.
        look, draft: the drafter's work, as part of a plain step, in vain and for drafts.
        quality: scales the tokens that drafts bring; `sway` makes it differ from step to step.
        promise: promised over true acceptance.
        noise: the standard deviation of a time; with `outliers`, one in 50 takes five times.
    """

    cost: Cost
    look: float = 0.03
    draft: float = 0.05
    quality: float = 1.0
    sway: float = 0.0
    promise: float = 1.0
    noise: float = 0.02
    outliers: bool = False
    slow: float = 1.0
    dear: float = 1.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def true_seconds(self, batch: int, n: int, looked: bool) -> float:
        plain = self.cost(batch, 0)
        if n == 0:
            return self.slow * plain * (1 + self.look * looked)
        return self.slow * self.dear * (self.cost(batch, n) + self.draft * plain)

    def costs(self, off: Callable[[int], float] = lambda tokens: 1.0) -> Costs:
        return Costs.of_forwards({t: self.cost(1, t - 1) * off(t) for t in MEASURED})

    def rate(self, batch: int, n: int) -> float:
        """Tokens a second of a request when `n` is kept."""
        return gain_of(n, self.quality) / self.true_seconds(batch, n, looked=False)

    def seen(self, seconds: float) -> float:
        seconds *= max(0.3, 1 + self.noise * self.rng.standard_normal())
        return seconds * (5 if self.outliers and self.rng.random() < 0.02 else 1)


@dataclass
class Score:
    """What a run came to, in true seconds and expected tokens."""

    tokens: float = 0.0
    seconds: float = 0.0
    plain: float = 0.0
    best: float = 0.0
    rungs: list[int] = field(default_factory=list)

    @property
    def over_plain(self) -> float:
        """Tokens in this time over those of plain decoding."""
        return self.plain / self.seconds

    @property
    def over_best(self) -> float:
        """The same against the best fixed rung."""
        return self.best / self.seconds

    def mostly(self, last: int = 500) -> int:
        return Counter(self.rungs[-last:]).most_common(1)[0][0]

    def share(self, n: int, first: int, last: int) -> float:
        return self.rungs[first:last].count(n) / (last - first)


def play(
    machine: Machine, planner: Planner, steps: int, batch: Callable[[int], int] | int = 1
) -> Score:
    """Run steps; `plain` and `best` are the seconds for the same tokens by a fixed rung."""
    score = Score()
    for step in range(steps):
        b = batch if isinstance(batch, int) else batch(step)
        quality = machine.quality * math.exp(machine.sway * machine.rng.standard_normal())
        looked = not planner.rests(b)
        n = 0
        if looked:
            gains = [gain_of(m, quality * machine.promise) for m in planner.ladder]
            n = planner.choose(b, np.array([gains] * b))
        seconds = machine.true_seconds(b, n, looked)
        gain = gain_of(n, quality)
        emitted = b + (int(machine.rng.binomial(8 * b, min(1.0, (gain - 1) / 8))) if n else 0)
        look = machine.slow * machine.look * machine.cost(b, 0) if looked else 0.0
        planner.finished(b, n, machine.seen(seconds), look, emitted)
        score.rungs.append(n)
        score.seconds += seconds
        score.tokens += b * gain
        score.plain += gain / machine.rate(b, 0)
        score.best += gain / max(machine.rate(b, m) for m in planner.ladder)
    return score


@pytest.mark.parametrize("cost", [memory_bound, stepwise, between, compute_bound])
@pytest.mark.parametrize("noisy", [False, True], ids=["quiet", "noisy"])
def test_it_comes_near_the_best_fixed_rung(cost: Cost, noisy: bool) -> None:
    machine = Machine(cost, noise=0.1 if noisy else 0.02, outliers=noisy)
    score = play(machine, Planner(CPU, machine.costs()), 2000)
    assert score.over_plain >= 0.98
    assert score.over_best >= (0.95 if noisy else 0.97)


def test_on_an_idle_machine_it_takes_many_nodes() -> None:
    machine = Machine(memory_bound)
    assert play(machine, Planner(CUDA, machine.costs()), 400).mostly(200) >= 31
    assert play(machine, Planner(CUDA, machine.costs()), 400, batch=32).mostly(200) <= 7


def test_where_each_token_costs_it_settles_at_plain() -> None:
    machine = Machine(compute_bound, look=0.2)
    score = play(machine, Planner(CPU, machine.costs()), 3000, batch=8)
    assert score.over_plain >= 0.98
    assert score.share(0, 500, 3000) > 0.99


def test_tokens_up_to_the_next_step_of_the_costs_are_used() -> None:
    machine = Machine(stepwise)
    assert play(machine, Planner(CPU, machine.costs()), 500).mostly(200) in (7, 15, 23)


@pytest.mark.parametrize("cost", [between, compute_bound])
def test_promises_that_are_not_kept_cost_little(cost: Cost) -> None:
    machine = Machine(cost, promise=2.0, quality=0.25, draft=0.1)
    score = play(machine, Planner(CPU, machine.costs()), 3000, batch=4)
    assert machine.rate(4, 0) == max(machine.rate(4, n) for n in CPU)
    assert score.over_plain >= 0.98
    assert score.mostly() == 0


@pytest.mark.parametrize("off", [0.5, 2.0])
@pytest.mark.parametrize("beyond", [0, 4])
@pytest.mark.parametrize("cost", [memory_bound, between, compute_bound])
def test_wrong_measurements_at_start_are_put_right(cost: Cost, beyond: int, off: float) -> None:
    """All forwards taken for twice as dear or cheap as they are, or only the larger ones."""
    machine = Machine(cost, noise=0.05)
    planner = Planner(CPU, machine.costs(lambda tokens: off if tokens > beyond else 1.0))
    score = play(machine, planner, 2000)
    assert score.over_plain >= 0.98
    assert score.over_best >= 0.93


def test_gains_are_followed_from_step_to_step() -> None:
    machine = Machine(between, sway=0.8)
    assert play(machine, Planner(CPU, machine.costs()), 1500).over_best > 1.02


def test_a_machine_that_slows_down_for_everything_does_not_flip_the_choice() -> None:
    machine = Machine(between, noise=0.05, outliers=True)
    planner = Planner(CPU, machine.costs())
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
def test_it_leaves_drafting_that_became_dear_and_comes_back_to_cheap(batch: int) -> None:
    machine = Machine(memory_bound, noise=0.05)
    planner = Planner(CPU, machine.costs())
    assert play(machine, planner, 600, batch).share(0, 300, 600) < 0.05
    machine.dear = 4.0
    dear = play(machine, planner, 2000, batch)
    assert dear.over_plain >= 0.98
    assert dear.share(0, 100, 2000) > 0.97
    machine.dear = 1.0
    cheap = play(machine, planner, 800, batch)
    assert cheap.share(0, 500, 800) < 0.05


def test_it_comes_back_when_drafts_begin_to_hit() -> None:
    machine = Machine(between, quality=0.0)
    planner = Planner(CPU, machine.costs())
    assert play(machine, planner, 2000).over_plain >= 0.98
    machine.quality = 1.0
    assert play(machine, planner, 500).share(0, 300, 500) < 0.05


@pytest.mark.parametrize("period", [1, 7, 300])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
def test_batches_that_come_and_go(cost: Cost, period: int) -> None:
    machine = Machine(cost, noise=0.05, outliers=True)
    score = play(
        machine,
        Planner(CPU, machine.costs()),
        2400,
        batch=lambda step: (1, 8, 32)[step // period % 3],
    )
    assert score.over_plain >= 0.98
    assert score.over_best >= 0.94


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    flat=st.floats(0.0, 1.0),
    draft=st.floats(0.0, 1.0),
    look=st.floats(0.0, 0.3),
    quality=st.floats(0.0, 1.2),
    promise=st.floats(0.5, 3.0),
    batch=st.sampled_from([1, 3, 8, 32]),
    seed=st.integers(0, 1000),
)
def test_it_never_loses_much_to_plain_decoding(
    flat: float, draft: float, look: float, quality: float, promise: float, batch: int, seed: int
) -> None:
    machine = Machine(
        lambda b, n: 0.02 * (flat + (1 - flat) * b * (n + 1) / 16 + 0.01),
        look=look,
        draft=draft,
        quality=quality,
        promise=promise,
        sway=0.3,
        noise=0.1,
        outliers=True,
        rng=np.random.default_rng(seed),
    )
    assert play(machine, Planner(CPU, machine.costs()), 1500, batch).over_plain >= 0.98


@pytest.mark.parametrize(("look", "share"), [(0.002, 1.0), (0.02, 0.25), (0.2, 0.025)])
def test_looks_in_vain_take_their_part_of_the_time(look: float, share: float) -> None:
    machine = Machine(compute_bound, look=look, noise=0.0)
    planner = Planner(CPU, machine.costs())
    looks = 0
    for step in range(2000):
        looked = not planner.rests(8)
        if looked:
            assert planner.choose(8, np.ones((8, len(CPU)))) == 0
        seconds = machine.true_seconds(8, 0, looked)
        planner.finished(8, 0, seconds, look * machine.cost(8, 0) * looked, 8)
        looks += looked and step >= 500
    assert looks / 1500 == pytest.approx(share, rel=0.2)


def test_a_text_that_repeats_itself_now_and_then_is_found_out() -> None:
    """Each row costs nearly half a plain step, so drafts pay while copies hit, and else never."""
    machine = Machine(lambda b, n: 0.03 * b * (1 + 0.45 * n), look=0.007, draft=0.01)
    planner = Planner(CPU, machine.costs())
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
    """As measured on two cores: a step hardly gets cheaper as requests leave the batch."""
    return 0.035 + 0.0006 * batch + 0.00075 * batch * n


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_requests_that_copy_do_not_make_all_others_wait(batch: int) -> None:
    """All of a batch answer at equal length, and it is done when the slowest is."""
    machine = Machine(two_cores, look=0.01)
    planner = Planner((0, 3), machine.costs())
    spent = plain = 0.0
    for _ in range(30):
        quality = np.where(np.arange(batch) < batch // 3, 5.0, 0.4)
        left = np.full(batch, 60.0)
        plain += 60 * machine.cost(batch, 0)
        while (left > 0).any():
            here = left > 0
            b, looked = int(here.sum()), not planner.rests(int(here.sum()))
            tokens = np.array([[1.0, gain_of(3, each)] for each in quality[here]])
            n = planner.choose(b, tokens) if looked else 0
            emitted = tokens[:, 1] if n else np.ones(b)
            seconds = machine.true_seconds(b, n, looked)
            look = machine.look * machine.cost(b, 0) * looked
            planner.finished(b, n, machine.seen(seconds), look, round(float(emitted.sum())))
            left[here] -= emitted
            spent += seconds
    assert plain / spent >= 0.98


def test_the_same_steps_make_the_same_choices() -> None:
    scores = []
    for _ in range(2):
        machine = Machine(between, noise=0.1, outliers=True, sway=0.3)
        scores.append(play(machine, Planner(CPU, machine.costs()), 400))
    assert scores[0] == scores[1]


def test_explain_tells_where_the_steps_went() -> None:
    machine = Machine(memory_bound, noise=0.0)
    planner = Planner(CUDA, machine.costs(lambda tokens: 2.0))
    score = play(machine, planner, 300, batch=lambda step: 1 if step < 200 else 8)
    rows = json.loads(json.dumps(planner.explain()))
    assert [(row["batch"], row["nodes"]) for row in rows] == sorted(
        {(1 if step < 200 else 8, n) for step, n in enumerate(score.rungs)}
    )
    assert sum(row["steps"] for row in rows) == 300
    for row in rows:
        seconds = machine.true_seconds(row["batch"], row["nodes"], looked=False)
        assert row["observed_ms"] == pytest.approx(1e3 * seconds, rel=0.05)
        assert row["tokens_per_second"] == pytest.approx(
            row["batch"] * row["realised_tokens"] / row["observed_ms"] * 1e3
        )
    top = max((row for row in rows if row["batch"] == 1), key=lambda row: row["steps"])
    assert top["nodes"] == score.mostly(300)
    assert top["realised_tokens"] == pytest.approx(gain_of(top["nodes"]), rel=0.1)
    assert top["expected_tokens"] == pytest.approx(top["realised_tokens"], rel=0.1)


def test_buckets_are_powers_of_two() -> None:
    assert [bucket_of(b) for b in (1, 2, 3, 5, 6, 8, 11, 12, 31, 33)] == [
        *(1, 2, 4, 4, 8, 8, 8, 16, 32, 32)
    ]


def test_forwards_are_interpolated_and_go_on_by_the_last_slope() -> None:
    costs = Costs.of_forwards({2: 1.0, 4: 2.0, 8: 2.4})
    assert [costs.forward(t) for t in (1, 2, 3, 6, 8, 16)] == pytest.approx(
        [1.0, 1.0, 1.5, 2.2, 2.4, 3.2]
    )
    assert Costs.of_forwards({1: 2.0, 4: 1.5}).forward(100) == 1.5
    assert Costs.of_forwards({4: 1.5}).forward(100) == 1.5


def test_what_was_seen_at_one_rung_carries_over_to_its_neighbours() -> None:
    costs = Costs.of_forwards({1: 1.0, 1000: 1.0})
    for _ in range(20):
        costs.observe(1, 0, 1.0)
        costs.observe(1, 15, 1.5)
    assert costs.seconds(1, 0) == pytest.approx(1.0)
    assert costs.seconds(1, 7) == pytest.approx(costs.seconds(1, 15)) == pytest.approx(1.5)
    assert costs.seconds(32, 0) == pytest.approx(1.0)
    assert costs.seconds(32, 7) == pytest.approx(1.5)
    assert costs.unsure(1, 7)
    assert not costs.unsure(1, 15)


def test_one_late_step_changes_little_and_many_change_all() -> None:
    costs = Costs.of_forwards({1: 1.0, 1000: 1.0})
    for _ in range(10):
        costs.observe(1, 0, 1.0)
    for _ in range(60):
        costs.observe(1, 15, 1.5)
    costs.observe(1, 15, 7.5)
    assert costs.seconds(1, 15) == pytest.approx(1.5, rel=0.05)
    for _ in range(10):
        costs.observe(1, 15, 3.0)
    assert costs.seconds(1, 15) == pytest.approx(3.0, rel=0.02)
    assert costs.seconds(1, 0) == pytest.approx(2.0, rel=0.02)
    assert costs.unsure(1, 0)
    for _ in range(4):
        costs.observe(1, 0, 1.0)
    assert costs.seconds(1, 0) == pytest.approx(1.0, rel=0.02)
    assert costs.seconds(1, 15) == pytest.approx(3.0, rel=0.02)


def test_errors_name_what_was_given() -> None:
    costs = Costs.of_forwards({1: 1.0})
    with pytest.raises(ValueError, match="forwards"):
        Costs.of_forwards({})
    with pytest.raises(ValueError, match="forwards"):
        Costs.of_forwards({1: 0.0})
    with pytest.raises(ValueError, match="seconds=0"):
        costs.observe(1, 0, 0)
    with pytest.raises(ValueError, match="batch=0"):
        costs.seconds(0, 0)
    with pytest.raises(ValueError, match="from 0"):
        Planner((7, 15), costs)
    with pytest.raises(ValueError, match="from 0"):
        Planner((0, 15, 7), costs)
    with pytest.raises(ValueError, match="2 rungs for a ladder of 5"):
        Planner(CUDA, costs).choose(1, np.array([[1.0, 2.0]]))


def test_nothing_is_drafted_where_there_is_nothing_to_draft() -> None:
    costs = Costs.of_forwards({1: 2.0, 4: 1.0, 8: 1.1})
    planner = Planner((0, 3, 7), costs)
    for _ in range(20):
        if not planner.rests(1):
            assert planner.choose(1, np.ones((1, 3))) == 0
        planner.finished(1, 0, 2.0, 0.0, 1)
    assert planner.choose(1, np.array([[1.0, 1.5, 1.5]])) in (0, 3)


def test_steps_that_are_always_cut_cannot_lose_for_long() -> None:
    """Near their ends requests' trees are cut, so that no rung is ever seen."""
    planner = Planner((0, 7), Costs.of_forwards({1: 1.0, 8: 1.0}))
    lost = 0.0
    for _ in range(2000):
        if planner.rests(1) or planner.choose(1, np.array([[1.0, 3.0]])) == 0:
            planner.finished(1, 0, 1.0, 0.0, 1)
        else:
            planner.cut(1, 3.0, 1)
            lost += 2.0
    assert 0 < lost < 0.02 * 2000
