"""What requests are expected to gain from drafts, averaged over their last steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from drafttree.arrays import FloatArray
from drafttree.budget.constants import BudgetConstants


@dataclass
class _Averages:
    """Averages that forget, one in each row.

    Attributes:
        values: `[R, S]`, NaN where nothing is known.
        counts: `[R]`, samples that each is worth, at most as many as are remembered.
        seen_at: `[R]`, step of the last sample.
    """

    values: FloatArray
    counts: FloatArray
    seen_at: FloatArray

    def rows(self, rows: FloatArray) -> _Averages:
        """Copies of some rows."""
        return _Averages(self.values[rows], self.counts[rows], self.seen_at[rows])

    def put(self, rows: FloatArray, averages: _Averages) -> None:
        """Replace some rows."""
        self.values[rows] = averages.values
        self.counts[rows] = averages.counts
        self.seen_at[rows] = averages.seen_at

    def with_rows(self, count: int, values: FloatArray, seen_at: int) -> _Averages:
        """The same and `count` further rows, each of which starts with `values` as one sample."""
        return _Averages(
            np.concatenate([self.values, np.tile(values, (count, 1))]),
            np.concatenate([self.counts, np.ones(count)]),
            np.concatenate([self.seen_at, np.full(count, seen_at)]),
        )

    def added(self, values: FloatArray, clock: int, smoothing: float) -> _Averages:
        """With a step's values, `[R, S]`, NaN where nothing was looked up."""
        forgotten = (1 - smoothing) ** (clock - self.seen_at - 1)
        counts = np.minimum(1 + np.maximum(1.0, self.counts * forgotten), 1 / smoothing)
        before = self.values
        mixed = before + (values - before) / counts[:, None]
        known = np.where(np.isnan(before), values, mixed)
        kept = np.where(np.isnan(values), before, known)
        return _Averages(kept, counts, np.full_like(self.seen_at, clock))


class ExpectedGains:
    """Tokens that each request is expected to emit at each size, by its latest steps.

    An average forgets by the steps that have passed, so that after a rest the first drafts count
    most. A request of which nothing is known yet is taken for one like the others, until its first
    step is known.
    """

    def __init__(self, num_sizes: int, constants: BudgetConstants) -> None:
        self._smoothing = constants.smoothing
        self._clock = 0
        self._usual = _Averages(np.full((1, num_sizes), np.nan), np.zeros(1), np.zeros(1))
        self._known = _Averages(np.empty((0, num_sizes)), np.empty(0), np.empty(0))
        self._rows: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Number of requests of which something is known."""
        return len(self._rows)

    def advance(self) -> None:
        """Note that a step has passed."""
        self._clock += 1

    def of(self, requests: Sequence[Hashable]) -> FloatArray:
        """Expected tokens, `[B, S]`; those of requests that are left out are forgotten.

        Where nothing is known of a size, it is expected to add nothing.
        """
        rows = np.array([self._rows.get(request, -1) for request in requests])
        known = rows >= 0
        expected: FloatArray = np.repeat(self._usual.values, len(rows), 0)
        expected[known] = self._known.values[rows[known]]
        if int(known.sum()) < len(self._rows):
            self._known = self._known.rows(rows[known])
            kept = [request for request in requests if request in self._rows]
            self._rows = {request: row for row, request in enumerate(kept)}
        expected[np.isnan(expected)] = 1.0
        return expected

    def learn(self, requests: Sequence[Hashable], expected: FloatArray) -> None:
        """Learn from a step's drafts, `[B, S]`; NaN where nothing was looked up."""
        is_known = ~np.isnan(expected)
        drafted: FloatArray = np.logical_or.reduce(is_known, axis=1)
        if not drafted.any():
            return
        named = [request for request, one in zip(requests, drafted, strict=True) if one]
        new = [request for request in named if request not in self._rows]
        if new:
            first = len(self._rows)
            self._rows |= {request: first + place for place, request in enumerate(new)}
            usual = self._usual.values
            self._known = self._known.with_rows(len(new), usual, self._clock - 1)
        rows = np.array([self._rows[request] for request in named])
        averages = self._known.rows(rows).added(expected[drafted], self._clock, self._smoothing)
        self._known.put(rows, averages)
        counts = is_known.sum(0)
        means = np.nansum(expected, 0) / np.maximum(counts, 1)
        means = np.where(counts > 0, means, np.nan)
        self._usual = self._usual.added(means[None], self._clock, self._smoothing)
