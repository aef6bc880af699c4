"""The curve of a forward's time over its number of tokens, from measurements at start-up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping


class ForwardCurve:
    """Seconds of a forward by the number of its tokens (rows).

    Linear between the measured counts, and extrapolated with the last slope. A forward cannot take
    longer than one with more tokens, so where the measurements say otherwise, something else
    delayed the smaller one, and the larger one's time counts.
    """

    def __init__(self, forward_seconds: Mapping[int, float]) -> None:
        """Start from measured forwards.

        Raises:
            ValueError: There is no forward, or one without tokens or without time.
        """
        if not forward_seconds or any(
            not (tokens >= 1 and 0 < seconds < math.inf)
            for tokens, seconds in forward_seconds.items()
        ):
            raise ValueError(
                f"forward_seconds={dict(forward_seconds)}: give at least one token count and its "
                "seconds, both positive"
            )
        self._counts = sorted(forward_seconds)
        self._times = [forward_seconds[count] for count in self._counts]
        for index in reversed(range(len(self._times) - 1)):
            self._times[index] = min(self._times[index : index + 2])
        self._known: dict[int, float] = {}

    def seconds(self, rows: int) -> float:
        """Predicted seconds of a forward over `rows` tokens."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._interpolate(rows)
        return known

    def _interpolate(self, rows: int) -> float:
        right = bisect_left(self._counts, rows)
        if right == 0 or len(self._counts) == 1:
            return self._times[0]
        right = min(right, len(self._counts) - 1)
        first, last = self._times[right - 1], self._times[right]
        slope = (last - first) / (self._counts[right] - self._counts[right - 1])
        return last + slope * (rows - self._counts[right])
