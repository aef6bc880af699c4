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
        weight = self._weight(clock) * math.exp(-1 / self.constants.memory)
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
