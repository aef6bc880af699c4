"""How long a model takes to draft, by the levels of the trees."""

from __future__ import annotations

import math

from drafttree.budget.costs import batch_bucket

_SMOOTHING = 1 / 8
_SMOOTHING_DOWN = 1 / 2
_MOST_RATIO = 4.0


class DraftTimes:
    """Usual seconds of drafting a tree by batch bucket and number of the model's forwards.

    A number of forwards that was not measured takes its share of the nearest one that was. Nothing
    costs time until something was measured.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}

    def add(self, batch_size: int, forwards: int, seconds: float) -> None:
        """Add a step whose trees took `forwards` forwards of the model.

        The first forwards may compile something, so a shorter time counts more than a longer one.
        """
        known = self._seconds.setdefault(batch_bucket(batch_size), {})
        usual = known.get(forwards)
        if usual is None:
            known[forwards] = seconds
            return
        bounded = min(seconds, _MOST_RATIO * usual)
        smoothing = _SMOOTHING_DOWN if seconds < 0.8 * usual else _SMOOTHING
        known[forwards] = usual + smoothing * (bounded - usual)

    def usual(self, batch_size: int, forwards: int) -> float:
        """Usual seconds of drafting with so many forwards."""
        if not self._seconds or not forwards:
            return 0.0
        bucket = batch_bucket(batch_size)
        nearest = min(self._seconds, key=lambda other: abs(math.log2(other / bucket)))
        known = self._seconds[nearest]
        measured = min(known, key=lambda other: (abs(other - forwards), other))
        return known[measured] * forwards / measured
