"""What requests are expected to gain from drafts, averaged over their last steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import FloatArray


class ExpectedGains:
    """Tokens that each request is expected to emit at each size, by its latest steps.

    An average forgets by the steps that have passed, so that after a rest the first drafts count
    most. A request of which nothing is known yet is taken for one like the others.
    """

    def __init__(self, num_sizes: int, constants: BudgetConstants) -> None:
        self._constants = constants
        self._clock = 0
        self._usual = np.full(num_sizes, np.nan)
        self._usual_at = 0
        self._known: dict[Hashable, tuple[FloatArray, int]] = {}

    def advance(self) -> None:
        """Note that a step has passed."""
        self._clock += 1

    def of(self, requests: Sequence[Hashable]) -> FloatArray:
        """Expected tokens, `[B, S]`; those of requests that are left out are forgotten.

        Where nothing is known of a size, it is expected to add nothing.
        """
        known = self._known
        self._known = {request: known[request] for request in requests if request in known}
        usual = np.where(np.isnan(self._usual), 1.0, self._usual)
        nothing = (usual, 0)
        return np.stack([self._known.get(request, nothing)[0] for request in requests])

    def learn(self, requests: Sequence[Hashable], expected: FloatArray) -> None:
        """Learn from a step's drafts, `[B, S]`; NaN where nothing was looked up."""
        drafted = ~np.isnan(expected).all(1)
        if not drafted.any():
            return
        counts = (~np.isnan(expected)).sum(0)
        means = np.where(counts > 0, np.nansum(expected, 0) / np.maximum(counts, 1), np.nan)
        usual = self._mixed(self._usual, means, self._usual_at)
        for request, values, is_drafted in zip(requests, expected, drafted, strict=True):
            if is_drafted:
                before, seen_at = self._known.get(request, (self._usual, self._clock - 1))
                self._known[request] = self._mixed(before, values, seen_at), self._clock
        self._usual, self._usual_at = usual, self._clock

    def _mixed(self, before: FloatArray, values: FloatArray, seen_at: int) -> FloatArray:
        """The average that `values` join, one step or more after it was last seen."""
        kept = (1 - self._constants.smoothing) ** (self._clock - seen_at)
        kept = max(kept, 0.5)
        mixed = kept * before + (1 - kept) * values
        return np.where(np.isnan(values), before, np.where(np.isnan(before), values, mixed))
