"""The tier controller: chooses the sizes of draft trees some steps before they are verified.

Where drafts stay on the device and steps overlap, the host fixes the size of a step's trees before
the outcomes of the two or three steps before it have arrived. So this is the planner for hosts that
cannot look at a step's drafts: its sizes are tiers, the few numbers of draft tokens that the engine
has captured a graph for, all requests have the same, and it chooses from what arrived with the
outputs of earlier steps. The costs, the acceptance calibration, the margin and the allowances are
the planner's.

Two things differ. What requests are expected to gain is averaged over their last steps, as the next
step's drafts are unknown. And what is spent on learning is charged when it is decided, one trial at
a time, as its outcome is late.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drafttree.arrays import FloatArray
from drafttree.budget.allowance import Allowance
from drafttree.budget.calibration import AcceptanceCalibration, certainty
from drafttree.budget.candidates import best_size, checked_sizes
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import CostModel, batch_bucket
from drafttree.budget.expected_gains import ExpectedGains
from drafttree.budget.model_drafts import ModelDrafts
from drafttree.budget.step_report import MeasuredStep
from drafttree.budget.tier_explanation import TierChoice, TierUpdate
from drafttree.budget.trials import Trials

_FIRST_LOOKUP = 0.05
"""Time of looking up drafts until it is known, as a share of a plain step."""
_LEAST_LOOKUP = 0.01
"""The least that it is taken for."""


@dataclass(frozen=True)
class TierPlan:
    """The decision for the trees of one step.

    Attributes:
        size: Draft tokens of each request.
        looks_up: Whether drafts are looked up; without any to verify, only to see whether they
            would help.
        is_trial: Whether the step is taken only to measure its size.
    """

    size: int
    looks_up: bool = False
    is_trial: bool = False

    @property
    def is_probe(self) -> bool:
        """Whether drafts are looked up only to see whether they would help."""
        return self.looks_up and not self.size


@dataclass(frozen=True)
class TierOutcome:
    """A step whose outputs have arrived.

    Attributes:
        plan: The decision for the trees that it verified.
        requests: Its requests that decoded, in the order of the batch.
        rows: Tokens that it verified for them, roots included.
        emitted: `[B]`, tokens that each of them emitted.
        expected: `[B, S]`, tokens that each was expected to emit if its tree were cut to each of
            the S sizes, bonus token included; NaN where nothing was looked up. None if that is so
            for all.
        seconds: Duration of the step; None if something other than decoding delayed it.
        drafts: The trees, if a model drafted them.
    """

    plan: TierPlan
    requests: Sequence[Hashable]
    rows: int
    emitted: FloatArray
    expected: FloatArray | None
    seconds: float | None
    drafts: ModelDrafts | None = None


class TierController:
    """Chooses one of a few sizes for the trees of each step, ahead of it.

    Call `choose` once for each step that is sent to the device, and `record` once for each step
    whose outputs have arrived, in the same order.

    Attributes:
        sizes: The tiers: numbers of draft tokens, ascending from 0.
        costs: The cost model. The time of drafting is part of a step's.
        trials: Decides on steps that are taken only to measure a size.
        probes: Allowance for looking up drafts that are not verified.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
    ) -> None:
        """Plan from forwards that were measured at start-up.

        Args:
            sizes: Numbers of draft tokens to choose from, ascending from 0.
            forward_seconds: Seconds of a forward by the number of its tokens.

        Raises:
            ValueError: The sizes do not start at 0 or do not ascend, or `forward_seconds` is
                empty or not positive.
        """
        self.sizes = checked_sizes(sizes)
        self.constants = BudgetConstants()
        self.costs = CostModel(sizes, forward_seconds, self.constants)
        self.trials = Trials(self.costs, self.constants)
        self.probes = Allowance(self.constants.learning_share, self.constants.probe_capacity)
        # What a step gains is known late, so that one copy must not change many steps.
        learning = self.constants.model_copy(update={"most_expected": 1.0})
        self._calibration = AcceptanceCalibration(self.sizes, learning)
        self._gains = ExpectedGains(len(self.sizes), self.constants)
        self._choice: TierChoice | None = None
        self._measured: list[MeasuredStep] = []
        self._lookups: dict[int, float] = {}
        self._trial_in_flight = False
        self._probe_in_flight = False

    def choose(self, requests: Sequence[Hashable], most: int) -> TierPlan:
        """Choose the trees that the next step verifies.

        Args:
            requests: Requests that it is going to have; at least one.
            most: Most draft tokens of a request for which there is room.
        """
        batch_size = len(requests)
        expected = self._gains.of(requests)
        levels = certainty(expected, self.sizes)
        calibrated = self._calibration.calibrate(expected, levels, self.costs.clock)
        gains, lowest = 1 / (1 / calibrated).mean(0), calibrated.min(0)
        seconds = self.costs.of_sizes(batch_size)
        fits = np.array(self.sizes) <= most
        best, rates = best_size(
            gains, np.where(fits, expected.mean(0), 1.0), seconds, self.constants.margin
        )
        self.trials.allowance.refill()
        self.probes.refill()
        trial = None
        if not self._trial_in_flight:
            trial = self._trial(batch_size, best, gains, lowest, rates, seconds)
        if trial is not None:
            self._trial_in_flight = True
            plan = TierPlan(self.sizes[trial], trial > 0, is_trial=True)
        elif best > 0:
            plan = TierPlan(self.sizes[best], True)
        else:
            has_room = bool(fits[1:2].any())
            plan = TierPlan(0, has_room and self._probe(batch_size, float(seconds[0])))
        wanted = best
        if not fits.all():
            wanted, _ = best_size(gains, expected.mean(0), seconds, self.constants.margin)
        chosen = self.sizes.index(plan.size)
        self._choice = TierChoice(
            size=plan.size,
            reason=_reason(plan, is_limited=not fits[wanted]),
            requests=batch_size,
            most=most,
            gain=float(gains[chosen] * seconds[0] / seconds[chosen]),
            sizes=self.sizes,
            tokens=tuple(gains.tolist()),
            seconds=tuple(seconds.tolist()),
        )
        return plan

    def record(self, outcome: TierOutcome) -> None:
        """Learn from a step whose outputs have arrived."""
        plan, batch_size = outcome.plan, len(outcome.requests)
        if plan.is_trial:
            self._trial_in_flight = False
        if plan.is_probe:
            self._probe_in_flight = False
        self._gains.advance()
        if not batch_size:
            return
        expected = self._learn_tokens(outcome)
        if outcome.seconds is None:
            return
        predicted = self.costs.seconds(batch_size, outcome.rows)
        if plan.is_probe:
            predicted += self._lookup_seconds(batch_size, predicted)
            self._learn_lookup(batch_size, outcome.seconds)
            self.costs.skip()
        elif self.costs.observe(batch_size, outcome.rows, outcome.seconds):
            self.trials.allowance.renew()
        self._measured.append(
            MeasuredStep(
                bucket=batch_bucket(batch_size),
                num_draft_tokens=plan.size,
                batch_size=batch_size,
                rows=outcome.rows,
                predicted_seconds=predicted,
                seconds=outcome.seconds,
                expected_tokens=expected,
                emitted_tokens=float(outcome.emitted.sum()),
                is_trial=plan.is_trial,
                is_wasted=plan.is_probe,
            )
        )

    def take_update(self) -> TierUpdate:
        """The choice that was made and the steps that were measured since the last call."""
        update = TierUpdate(self._choice, tuple(self._measured))
        self._choice = None
        self._measured.clear()
        return update

    def _trial(
        self,
        batch_size: int,
        best: int,
        gains: FloatArray,
        lowest: FloatArray,
        rates: FloatArray,
        seconds: FloatArray,
    ) -> int | None:
        """The index of a size to take in place of the best one, to learn from it."""
        trials = self.trials
        if best and trials.wants_plain(batch_size, best, float(gains[best]), seconds):
            index = 0
        elif (size := trials.size(batch_size, best, gains, lowest, rates)) is not None:
            index = size
        else:
            return None
        spent = trials.seconds(batch_size, index, best, seconds)
        trials.charge(spent / float(seconds[best]), float(gains[best]), float(lowest[index]))
        return index

    def _probe(self, batch_size: int, plain_seconds: float) -> bool:
        """Whether drafts are due to be looked up while plain decoding is in use."""
        cost = self._lookup_seconds(batch_size, plain_seconds) / plain_seconds
        # One at a time, so that plain steps are measured too however little a lookup takes.
        if self._probe_in_flight or not self.probes.covers(cost):
            return False
        self.probes.charge(cost)
        self._probe_in_flight = True
        return True

    def _lookup_seconds(self, batch_size: int, plain_seconds: float) -> float:
        """Usual time of looking up drafts, which is never taken for nothing."""
        known = self._lookups.get(batch_bucket(batch_size), _FIRST_LOOKUP * plain_seconds)
        return max(known, _LEAST_LOOKUP * plain_seconds)

    def _learn_lookup(self, batch_size: int, seconds: float) -> None:
        """Learn from the time of a plain step for which drafts were looked up."""
        plain_seconds = self.costs.seconds(batch_size, batch_size)
        usual = self._lookup_seconds(batch_size, plain_seconds)
        sample = min(seconds - plain_seconds, self.constants.max_draft_ratio * usual)
        self._lookups[batch_bucket(batch_size)] = usual + self.constants.smoothing * (
            max(sample, -usual) - usual
        )

    def _learn_tokens(self, outcome: TierOutcome) -> float:
        """Learn from the tokens of a step, and return how many were expected of it."""
        size, batch_size = outcome.plan.size, len(outcome.requests)
        expected, index = outcome.expected, self.sizes.index(size)
        if expected is None:
            return float(outcome.emitted.sum())
        self._gains.learn(outcome.requests, expected)
        drafts = expected[:, index] - 1
        known = ~np.isnan(drafts)
        if not size or not known.any():
            return float(outcome.emitted.sum())
        levels = certainty(expected[known], self.sizes)
        ratios = self._calibration.ratios(levels, self.costs.clock)[:, index]
        drafts, accepted = drafts[known], outcome.emitted[known] - 1
        self._calibration.add(levels, size, drafts, accepted, self.costs.clock)
        return batch_size + float((ratios * drafts).sum())


def _reason(plan: TierPlan, *, is_limited: bool) -> str:
    """Why a tier was chosen, as `TierChoice` names it."""
    if plan.is_trial:
        return "trial"
    if is_limited:
        return "limit"
    if plan.is_probe:
        return "probe"
    return "best" if plan.size else "rest"
