"""What requests are expected to gain from drafts, averaged over their last steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import FloatArray


@dataclass
class _Average:
    """An average that forgets.

    Attributes:
        values: `[S]`, NaN where nothing is known.
        count: Samples that it is worth, at most as many as are remembered.
        seen_at: Step of the last sample.
    """

    values: FloatArray
    count: float
    seen_at: int


class ExpectedGains:
    """Tokens that each request is expected to emit at each size, by its latest steps.

    An average forgets by the steps that have passed, so that after a rest the first drafts count
    most. A request of which nothing is known yet is taken for one like the others, until its first
    step is known.
    """

    def __init__(self, num_sizes: int, constants: BudgetConstants) -> None:
        self._smoothing = constants.smoothing
        self._clock = 0
        self._usual = _Average(np.full(num_sizes, np.nan), 0.0, 0)
        self._known: dict[Hashable, _Average] = {}

    def advance(self) -> None:
        """Note that a step has passed."""
        self._clock += 1

    def of(self, requests: Sequence[Hashable]) -> FloatArray:
        """Expected tokens, `[B, S]`; those of requests that are left out are forgotten.

        Where nothing is known of a size, it is expected to add nothing.
        """
        known = self._known
        self._known = {request: known[request] for request in requests if request in known}
        averages = [self._known.get(request, self._usual).values for request in requests]
        expected: FloatArray = np.nan_to_num(np.stack(averages), nan=1.0)
        return expected

    def learn(self, requests: Sequence[Hashable], expected: FloatArray) -> None:
        """Learn from a step's drafts, `[B, S]`; NaN where nothing was looked up."""
        is_known = ~np.isnan(expected)
        counts = is_known.sum(0)
        if not counts.any():
            return
        for request, values, known in zip(requests, expected, is_known, strict=True):
            if known.any():
                average = self._known.get(request)
                if average is None:
                    usual = self._usual.values
                    average = self._known[request] = _Average(usual, 1.0, self._clock - 1)
                self._add(average, values)
        means = np.nansum(expected, 0) / np.maximum(counts, 1)
        self._add(self._usual, np.where(counts > 0, means, np.nan))

    def _add(self, average: _Average, values: FloatArray) -> None:
        """Add a step's values to an average that was last seen a step ago, or earlier."""
        forgotten = (1 - self._smoothing) ** (self._clock - average.seen_at - 1)
        average.count = 1 + max(1.0, average.count * forgotten)
        average.count = min(average.count, 1 / self._smoothing)
        before = average.values
        mixed = before + (values - before) / average.count
        known = np.where(np.isnan(before), values, mixed)
        average.values = np.where(np.isnan(values), before, known)
        average.seen_at = self._clock
