"""The tier controller: chooses the sizes of draft trees some steps before they are verified.

Where drafts stay on the device and steps overlap, the host fixes the size of a step's trees before
the outcomes of the two or three steps before it have arrived. So this is the planner for hosts that
cannot look at a step's drafts: its sizes are tiers, the few numbers of draft tokens that the engine
has captured a graph for, all requests have the same, and it chooses from what arrived with the
outputs of earlier steps. The costs, the acceptance calibration, the margin and the allowances are
the planner's.

Two things differ. What requests are expected to gain is averaged over their last steps, as the next
step's drafts are unknown. And whatever is spent on learning is charged when it is decided, one
trial at a time, as its outcome is late.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drafttree.budget.allowance import Allowance
from drafttree.budget.calibration import AcceptanceCalibration
from drafttree.budget.candidates import best_size, checked_sizes
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import CostModel, FloatArray, batch_bucket
from drafttree.budget.expected_gains import ExpectedGains
from drafttree.budget.step_report import StepReport
from drafttree.budget.trials import Trials


@dataclass(frozen=True)
class TierPlan:
    """The decision for the trees of one step.

    Attributes:
        size: Draft tokens of each request.
        is_trial: Whether they are drafted, or left out, only to learn from it.
    """

    size: int
    is_trial: bool = False


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
    """

    plan: TierPlan
    requests: Sequence[Hashable]
    rows: int
    emitted: FloatArray
    expected: FloatArray | None
    seconds: float | None


class TierController:
    """Chooses one of a few sizes for the trees of each step, ahead of it.

    Call `choose` once for each step that is sent to the device, and `record` once for each step
    whose outputs have arrived, in the same order.

    Attributes:
        sizes: The tiers: numbers of draft tokens, ascending from 0.
        costs: The cost model. The time of drafting is part of a step's.
        trials: Decides on steps that are taken only to measure a size.
        probes: Allowance for drafts while plain decoding is in use, to see whether they would help.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
        constants: BudgetConstants | None = None,
    ) -> None:
        """Plan from forwards that were measured at start-up.

        Args:
            sizes: Numbers of draft tokens to choose from, ascending from 0.
            forward_seconds: Seconds of a forward by the number of its tokens.
            constants: Tuned constants; the defaults if None.

        Raises:
            ValueError: The sizes do not start at 0 or do not ascend, or `forward_seconds` is
                empty or not positive.
        """
        self.sizes = checked_sizes(sizes)
        self.constants = constants or BudgetConstants()
        self.costs = CostModel(sizes, forward_seconds, self.constants)
        self.trials = Trials(self.costs, self.constants)
        self.probes = Allowance(self.constants.learning_share, self.constants.probe_capacity)
        self._calibration = AcceptanceCalibration(self.constants)
        self._gains = ExpectedGains(len(self.sizes), self.constants)
        self._report = StepReport()
        self._trial_in_flight = False

    def choose(self, requests: Sequence[Hashable], most: int) -> TierPlan:
        """Choose the trees that the next step verifies.

        Args:
            requests: Requests that it is going to have; at least one.
            most: Most draft tokens of a request for which there is room.
        """
        batch_size = len(requests)
        expected = self._gains.of(requests)
        calibrated = self._calibrated(batch_size, expected)
        gains, lowest = 1 / (1 / calibrated).mean(0), calibrated.min(0)
        seconds = self.costs.of_sizes(batch_size)
        fits = np.array(self.sizes) <= most
        best, rates = best_size(
            gains, np.where(fits, expected.mean(0), 1.0), seconds, self.constants.margin
        )
        self.trials.allowance.refill()
        self.probes.refill()
        index = None
        if not self._trial_in_flight:
            index = self._trial(batch_size, best, gains, lowest, rates, seconds)
            if index is None and best == 0 and fits[1:2].any():
                index = self._probe(lowest, seconds)
        if index is None:
            return TierPlan(self.sizes[best])
        self._trial_in_flight = True
        return TierPlan(self.sizes[index], is_trial=True)

    def record(self, outcome: TierOutcome) -> None:
        """Learn from a step whose outputs have arrived."""
        plan, batch_size = outcome.plan, len(outcome.requests)
        if plan.is_trial:
            self._trial_in_flight = False
        self._gains.advance()
        if not batch_size:
            return
        bucket, index = batch_bucket(batch_size), self.sizes.index(plan.size)
        emitted = float(outcome.emitted.sum())
        expected = emitted
        if outcome.expected is not None:
            self._gains.learn(outcome.requests, outcome.expected)
            drafts = outcome.expected[:, index] - 1
            if plan.size and (known := ~np.isnan(drafts)).any():
                drafts, accepted = drafts[known], outcome.emitted[known] - 1
                ratio = self._ratios(batch_size)[index]
                expected = batch_size + ratio * float(drafts.sum())
                # A long copy is accepted as a whole or breaks off: that counts as one token.
                weights = 1 / np.maximum(drafts, 1.0)
                self._calibration.add(
                    bucket,
                    plan.size,
                    float((weights * drafts).sum()),
                    float((weights * accepted).sum()),
                    self.costs.clock,
                )
        if outcome.seconds is None:
            return
        predicted = self.costs.seconds(batch_size, outcome.rows)
        if self.costs.observe(batch_size, outcome.rows, outcome.seconds):
            self.trials.allowance.renew()
        self._report.add(
            bucket,
            plan.size,
            batch_size,
            rows=outcome.rows,
            predicted_seconds=predicted,
            seconds=outcome.seconds,
            expected_tokens=expected,
            emitted_tokens=emitted,
            is_trial=plan.is_trial,
            is_wasted=False,
        )

    def explain(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and size; see `StepReport.rows`."""
        return self._report.rows()

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
        trials.charge(
            float(seconds[index] / seconds[best]), float(gains[best]), float(lowest[index])
        )
        return index

    def _probe(self, lowest: FloatArray, seconds: FloatArray) -> int | None:
        """The index of the smallest size, to see what drafts would gain, if that is due."""
        loss = max(float(seconds[1] / seconds[0] - lowest[1]), self.constants.margin - 1)
        if not self.probes.covers(loss):
            return None
        self.probes.charge(loss)
        return 1

    def _calibrated(self, batch_size: int, expected: FloatArray) -> FloatArray:
        calibrated: FloatArray = 1 + self._ratios(batch_size) * (expected - 1)
        calibrated[:, 0] = 1.0
        return calibrated

    def _ratios(self, batch_size: int) -> FloatArray:
        return np.array(
            self._calibration.ratios(batch_bucket(batch_size), self.sizes, self.costs.clock)
        )
