"""The factors of a cost model's sizes for one batch bucket, and what has changed of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from drafttree.arrays import FloatArray


def value_at(values: FloatArray, size: int, weight: float) -> float:
    """A value between those of the size at index `size`, with `weight`, and of the next."""
    value: float = values[size]
    return value if weight == 1 else weight * value + (1 - weight) * float(values[size + 1])


def project(covariance: FloatArray, size: int, weight: float) -> tuple[FloatArray, float]:
    """Covariances of all factors with the one at a place between two sizes, and its variance."""
    row: FloatArray = covariance[size]
    if weight < 1:
        row = weight * row + (1 - weight) * covariance[size + 1]
    return row, value_at(row, size, weight)


class Recheck(NamedTuple):
    """A size whose time has changed: what changed it may end while another size is in use.

    Attributes:
        changed: Index of the size; 0 for any size with drafts, if plain steps have changed.
        waited: Steps since it was last measured.
        wait: Steps after which it is due: 16, for example, and then whenever twice as many have
            passed since the change.
    """

    changed: int
    waited: int
    wait: int


class Factors:
    """The logarithms of one batch bucket's factors, and how uncertain they are.

    Attributes:
        mean: `[S]`, the estimates.
        covariance: `[S, S]`, of their errors.
        seen_at: Step of the last sample.
        outliers: `[S]`, the consecutive outliers to one side of each size.
        changed_at: Step of the last lasting change; None if there was none.
        changed: Index of the size whose time had changed.
        checked_at: Step at which that size was last measured, for plain steps one with drafts.
        seen_of_kind: Step of the last sample of a plain step, and of one with drafts.
        doubtful: Whether that sample was the first of its kind for long, and unexpectedly slow.
    """

    def __init__(self, mean: FloatArray, covariance: FloatArray, clock: int) -> None:
        self.mean = mean.copy()
        self.covariance = covariance.copy()
        self.seen_at = clock
        self.outliers: list[list[float]] = [[] for _ in mean]
        self.changed_at: int | None = None
        self.changed = 0
        self.checked_at = 0
        self.seen_of_kind = [-math.inf, -math.inf]
        self.doubtful = [False, False]
