"""A ratio of two sums that forget old steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafttree.budget.constants import BudgetConstants


@dataclass
class DecayingRatio:
    """The ratio of what came true to what was predicted, over recent steps.

    Old steps lose weight exponentially, by the steps added since and by the time elapsed, so that
    without new steps the ratio returns to its prior.
    """

    constants: BudgetConstants
    predicted: float = 0.0
    actual: float = 0.0
    updated_at: int = 0

    def add(self, predicted: float, actual: float, clock: int) -> None:
        """Add a step at `clock`, the number of steps so far."""
        weight = self._weight_before(clock)
        self.predicted = self.predicted * weight + predicted
        self.actual = self.actual * weight + actual
        self.updated_at = clock

    def value(self, prior: float, clock: int) -> float:
        """The ratio at `clock`, drawn towards `prior` where few steps are known."""
        weight, prior_weight = self._weight(clock), self.constants.prior_weight
        return (prior * prior_weight + weight * self.actual) / (
            prior_weight + weight * self.predicted
        )

    def _weight(self, clock: int) -> float:
        return math.exp(-(clock - self.updated_at) / self.constants.age_memory)

    def _weight_before(self, clock: int) -> float:
        """The weight of all earlier steps when one is added at `clock`."""
        return self._weight(clock) * math.exp(-1 / self.constants.memory)


@dataclass
class StallRatio(DecayingRatio):
    """The ratio of the mean time of steps to their usual time, in which one stall counts little.

    What the slowest step took beyond its prediction counts as at most `most_of_one_stall`, or as
    much as all others took beyond theirs: one long stall does not tell how often steps stall.

    Attributes:
        largest: The largest excess of a step, which loses weight like the sums.
    """

    largest: float = 0.0

    def add(self, predicted: float, actual: float, clock: int) -> None:
        """Add a step at `clock`, the number of steps so far."""
        self.largest = max(self.largest * self._weight_before(clock), actual - predicted)
        super().add(predicted, actual, clock)

    def value(self, prior: float, clock: int) -> float:
        """The ratio at `clock`, drawn towards `prior` where few steps are known."""
        others = self.actual - self.predicted - self.largest
        uncounted = max(0.0, self.largest - max(others, self.constants.most_of_one_stall))
        weight = self._weight(clock)
        steps = self.constants.prior_weight + weight * self.predicted
        return super().value(prior, clock) - weight * uncounted / steps
