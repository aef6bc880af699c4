"""How long a model takes to draft, by the levels of the trees, and to read what it has missed."""

from __future__ import annotations

import math

from drafttree.budget.costs import batch_bucket

_SMOOTHING = 1 / 8
_SMOOTHING_DOWN = 1 / 2
_MOST_RATIO = 4.0
_READ_MEMORY = 512
"""Tokens that were read after which earlier ones count 1/e."""


class DraftTimes:
    """Usual seconds of drafting a tree by batch bucket and number of the model's forwards.

    A number of forwards that was not measured takes its share of the nearest one that was. Nothing
    costs time until something was measured. The first trees with a number of forwards are not
    measured: they may load or compile something, which took up to 150 plain steps.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        self._warm: set[int] = set()

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._seconds)

    def warm(self, forwards: int) -> bool:
        """Whether trees with so many forwards of the model have been drafted before."""
        return forwards in self._warm

    def add(self, batch_size: int, forwards: int, seconds: float, plain_seconds: float) -> float:
        """Add a step whose trees took `forwards` forwards of the model.

        Something may be compiled later too, so a shorter time counts more than a longer one, and
        far more than the usual time counts in part.

        Args:
            batch_size: Number of requests.
            forwards: Number of forwards.
            seconds: What drafting took.
            plain_seconds: What a step without the model takes. The first time that is measured
                counts as at most four of them.

        Returns:
            What the time counts as. The first trees of a number of forwards are not measured.
        """
        if forwards not in self._warm:
            self._warm.add(forwards)
            return seconds
        known = self._seconds.setdefault(batch_bucket(batch_size), {})
        usual = known.get(forwards)
        if usual is None:
            known[forwards] = min(seconds, _MOST_RATIO * plain_seconds)
            return known[forwards]
        bounded = min(seconds, _MOST_RATIO * usual)
        smoothing = _SMOOTHING_DOWN if seconds < 0.8 * usual else _SMOOTHING
        known[forwards] = usual + smoothing * (bounded - usual)
        return bounded

    def usual(self, batch_size: int, forwards: int) -> float:
        """Usual seconds of drafting with so many forwards."""
        if not self._seconds or not forwards:
            return 0.0
        bucket = batch_bucket(batch_size)
        nearest = min(self._seconds, key=lambda other: abs(math.log2(other / bucket)))
        known = self._seconds[nearest]
        measured = min(known, key=lambda other: (abs(other - forwards), other))
        return known[measured] * forwards / measured


class ReadTimes:
    """Usual seconds in which a model reads a token of a text; 0 until something was measured.

    A forward over few tokens takes longer for each of them, so a read counts by its tokens.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add what it took to read some tokens; nothing if there were none.

        If it took far longer than usual, something else is likely to have delayed it.
        """
        if not tokens:
            return
        if self._tokens:
            seconds = min(seconds, _MOST_RATIO * self.usual(tokens))
        kept = math.exp(-tokens / _READ_MEMORY)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds

    def usual(self, tokens: int) -> float:
        """Usual seconds of reading so many tokens."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0
