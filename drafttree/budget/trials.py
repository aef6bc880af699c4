"""Trials: steps that are taken only to measure a size that may be better than its prediction."""

from __future__ import annotations

import math

import numpy as np

from drafttree.arrays import FloatArray
from drafttree.budget.allowance import Allowance
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import CostModel


class Trials:
    """Decides when a size that is not the best one is tried.

    Attributes:
        allowance: What may be spent on trials.
    """

    def __init__(self, costs: CostModel, constants: BudgetConstants) -> None:
        self._costs = costs
        self._constants = constants
        self.allowance = Allowance(constants.learning_share, constants.trial_capacity)

    def wants_plain(self, batch_size: int, index: int, gain: float, seconds: FloatArray) -> bool:
        """Whether to try plain decoding, for which no drafts are looked up.

        Args:
            batch_size: Number of requests.
            index: Index of the size in use.
            gain: Tokens that a request gains from it.
            seconds: `[S]`, predicted mean seconds at each size.
        """
        constants, costs = self._constants, self._costs
        # If drafting wins only because plain steps are supposed to stall like it, see if they do.
        if costs.unstalled_plain_seconds(batch_size) * gain < seconds[index]:
            return True
        plain, wanted = float(seconds[0]), float(seconds[index]) * constants.margin
        surprises = costs.surprises(batch_size)
        if surprises is not None and surprises[0] < 1 and plain * surprises[0] * gain < wanted:
            return True
        plain = self.seconds(batch_size, 0, index, seconds)
        if not self.allowance.covers(self._loss(plain / float(seconds[index]), gain, 1.0)):
            return False
        # The only plain step for long may have been delayed.
        if costs.is_doubtful(batch_size, drafted=False):
            return True
        deviation = float(costs.deviations(batch_size, index)[0])
        optimism = math.exp(-constants.optimism * deviation)
        return self._excess(batch_size, index) * optimism > 1 or plain * optimism * gain < wanted

    def seconds(self, batch_size: int, index: int, best: int, means: FloatArray) -> float:
        """What a trial is expected to take.

        A plain step takes no longer than one that also verifies drafts. If it seems to, some that
        were measured were delayed.

        Args:
            batch_size: Number of requests.
            index: Index of the size that is tried.
            best: Index of the size in use.
            means: `[S]`, predicted mean seconds at each size.
        """
        if index:
            return float(means[index])
        plain = float(means[0]) / max(1.0, self._excess(batch_size, best))
        return min(plain, float(means[best]))

    def size(
        self,
        batch_size: int,
        best: int,
        gains: FloatArray,
        lowest: FloatArray,
        rates: FloatArray,
    ) -> int | None:
        """The index of a size to try in place of the best one; None if none is worth it.

        Args:
            batch_size: Number of requests.
            best: Index of the best size.
            gains: `[S]`, tokens that a request gains at each size, in the harmonic mean.
            lowest: `[S]`, tokens of the request that gains least.
            rates: `[S]`, tokens per second of a request; 0 for sizes that add no drafts.
        """
        constants, costs = self._constants, self._costs
        wanted = float(rates[best]) * (1 if best else constants.margin)
        seconds = gains / np.maximum(rates, 1e-9)

        def fastest(factors: FloatArray) -> tuple[int, float]:
            """The size with the highest rate if each took its time times a factor."""
            # No step takes less time than a plain one.
            optimistic = gains / np.maximum(seconds * factors, 1 / rates[0])
            # A size that gains less could not win even if it cost no more than plain decoding.
            optimistic[gains <= constants.margin] = 0.0
            optimistic[rates == 0] = optimistic[0] = optimistic[best] = 0.0
            index = int(optimistic.argmax())
            return index, float(optimistic[index])

        def loss(index: int) -> float:
            relative = float(seconds[index] * rates[best] / gains[best])
            return self._loss(relative, float(gains[best]), float(lowest[index]))

        # The only step with drafts for long may have been delayed.
        if best == 0 and costs.is_doubtful(batch_size, drafted=True):
            undelayed = seconds - costs.of_sizes(batch_size) + costs.by_curve(batch_size)
            index, rate = fastest(undelayed / seconds)
            if rate > wanted:
                return index
        if (surprises := costs.surprises(batch_size)) is not None:
            index, rate = fastest(surprises)
            if rate > wanted:
                return index
        index, rate = fastest(np.exp(-constants.optimism * costs.deviations(batch_size, best)))
        # A few stalls say little of how often steps with drafts stall.
        is_unlucky = best == 0 and rate > 0 and not costs.knows_stalls_of_drafts
        if is_unlucky and gains[index] > costs.usual_of_sizes(batch_size)[index] * rates[0]:
            return index
        check = costs.recheck(batch_size)
        if check is not None and (check.changed or best == 0):
            size = check.changed or index
            wait = max(constants.recheck_steps, loss(size) / constants.recheck_share)
            gains_most = gains[size] > max(constants.margin, gains[best]) and rates[size] > 0
            if gains_most and check.waited >= min(check.wait, wait):
                return size
        if rate <= (0 if self.allowance.is_full else wanted):
            return None
        return index if self.allowance.covers(loss(index)) else None

    def charge(self, seconds: float, best_gain: float, gain: float) -> None:
        """Charge the allowance for a trial; see `_loss`."""
        self.allowance.charge(self._loss(seconds, best_gain, gain))

    def _excess(self, batch_size: int, index: int) -> float:
        """The ratio of a plain step's usual time to that of a step at the size in use."""
        usual = self._costs.usual_of_sizes(batch_size)
        return float(usual[0] / usual[index])

    def _loss(self, seconds: float, best_gain: float, gain: float) -> float:
        """What a trial loses, in steps of the best size.

        Some is lost even by a size that is as good, so that trials of two such sizes do not end up
        as frequent as other steps.

        Args:
            seconds: Duration of the trial, in steps of the best size.
            best_gain: Tokens of a request in a step of the best size.
            gain: Tokens of a request in the trial.
        """
        return max(seconds - gain / best_gain, (self._constants.margin - 1) * gain / best_gain)
