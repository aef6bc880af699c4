"""What a decode step costs, by batch and draft nodes: measured once, then kept up to date.

A step of B requests with n draft nodes each verifies B (n + 1) tokens. A few forwards at start
give a first curve over that count; the times of whole steps then correct it, for each bucket of
batch sizes and each n by its own ratio, and for all of them by one common level. The level takes
up what makes every step dearer, as a busy machine or long contexts do: what has not been seen for
a while moves with it, so a choice between two n does not flip because only one of them is watched.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Self

# Observations that make a first estimate, and that must agree before it jumps; and those that must
# agree before the common level does. A machine may well be late three times running.
WITNESSES = 3
CROWD = 5
# A cell unseen for this many observations has been away.
AWAY = 32
# A cell moves the common level after so many observations in all, and since it was away.
SETTLED = 32
BACK = 8
# The least weight of one observation, in logarithms, on the level and on a cell's own ratio.
LEVEL_RATE = 1 / 16
OWN_RATE = 1 / 128
RETURN_RATE = 1 / 24
NOISE_RATE = 1 / 32
# The mean deviation of an observation: the first guess and the least. Beyond four of it is odd.
NOISE, LEAST_NOISE = 0.05, 0.01
ODD = 4.0
# What was seen before the level moved by this much is worth another look.
MOVED = 0.1


def bucket_of(batch: int) -> int:
    """The power of two nearest to a batch size, by ratio: 1, 2, 4 (for 3 to 5), 8 (6 to 11) …"""
    if batch < 1:
        raise ValueError(f"batch={batch}: a step has at least one request")
    return 1 << round(math.log2(batch))


@dataclass
class _Cell:
    """The logarithm of observed over predicted seconds at one (bucket, n), less the level."""

    own: float
    recent: deque[float]
    count: int
    since_away: int
    seen_at: int
    level: float


class Costs:
    """Seconds of a decode step as a function of (batch, n), n the draft nodes of a request."""

    def __init__(self, forwards: Mapping[int, float]) -> None:
        """Start from measured forwards: seconds by the number of tokens in them.

        Raises:
            ValueError: no forward, or one without tokens or without time.
        """
        if not forwards or any(not (t >= 1 and 0 < s < math.inf) for t, s in forwards.items()):
            raise ValueError(f"forwards={dict(forwards)}: give the seconds of some token counts")
        self._tokens = sorted(forwards)
        self._times = [forwards[tokens] for tokens in self._tokens]
        self._curve: dict[int, float] = {}
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._stand_ins: dict[tuple[int, int], _Cell | None] = {}
        self._level = 0.0
        self._noise = NOISE
        self.clock = 0

    @classmethod
    def of_forwards(cls, forwards: Mapping[int, float]) -> Self:
        """Costs from forwards measured at start, `{tokens: seconds}`."""
        return cls(forwards)

    def forward(self, tokens: int) -> float:
        """Seconds of a forward of `tokens`: linear between the measured, then on by the last slope.

        The last slope counts as flat where noise made it fall, as time cannot run out.
        """
        known = self._curve.get(tokens)
        if known is None:
            known = self._curve[tokens] = self._interpolate(tokens)
        return known

    def seconds(self, batch: int, n: int) -> float:
        """The expected seconds of a step at `n`, of a plain one at 0."""
        key = bucket_of(batch), n
        return self._priced(batch, n, self._own(key))

    def latest(self, batch: int, n: int) -> float:
        """As `seconds`, but believing an odd last observation, which may be the first of more.

        With few observations the hopeful one is believed.
        """
        cell = self._cells.get((bucket_of(batch), n))
        if cell is not None and cell.count < WITNESSES:
            return self._priced(batch, n, min(cell.recent))
        if cell is not None and self._is_odd(cell.recent[-1] - cell.own):
            return self._priced(batch, n, cell.recent[-1])
        return self.seconds(batch, n)

    def observe(self, batch: int, n: int, seconds: float) -> None:
        """Book the time of a whole step at `n`.

        Raises:
            ValueError: the time is not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds={seconds}: a step takes time")
        self.clock += 1
        key = bucket_of(batch), n
        off = math.log(seconds / self.forward(batch * (n + 1))) - self._level
        cell = self._cells.get(key)
        if cell is None:
            # What was expected is the first witness, lest one odd time decide alone.
            recent = deque([self._own(key) if self._cells else off, off], maxlen=CROWD)
            self._cells[key] = _Cell(median(recent), recent, 1, 1, self.clock, self._level)
            self._stand_ins.clear()
            return
        cell.since_away = 1 + (cell.since_away if self.clock - cell.seen_at <= AWAY else 0)
        cell.count += 1
        cell.recent.append(off)
        self._learn(cell, off)
        cell.seen_at, cell.level = self.clock, self._level

    def unsure(self, batch: int, n: int) -> bool:
        """Whether (batch, n) wants another observation: too few, the last was odd, or all moved."""
        cell = self._cells.get((bucket_of(batch), n))
        return (
            cell is None
            or cell.count < WITNESSES
            or self._is_odd(cell.recent[-1] - cell.own)
            or abs(self._level - cell.level) > MOVED
        )

    def age(self, batch: int, n: int) -> int:
        """Observations since (batch, n) was last seen; all that were made if it never was."""
        cell = self._cells.get((bucket_of(batch), n))
        return self.clock - (cell.seen_at if cell else 0)

    def count(self, batch: int, n: int) -> int:
        """How often (batch, n) was seen since its estimate was last thrown over."""
        cell = self._cells.get((bucket_of(batch), n))
        return cell.count if cell else 0

    def _learn(self, cell: _Cell, off: float) -> None:
        if cell.count <= WITNESSES:
            cell.own = median(list(cell.recent)[-WITNESSES:])
            return
        # A change under a cell's own eyes is taken for everybody's until others are seen again;
        # one found on coming back is the cell's own.
        in_place = cell.count > SETTLED and cell.since_away > BACK
        needed = CROWD if in_place else WITNESSES
        surprises = [value - cell.own for value in cell.recent][-needed:]
        if all(map(self._is_odd, surprises)) and (min(surprises) > 0 or max(surprises) < 0):
            shift = median(surprises)
            if in_place:
                self._level += shift
                cell.recent.extend([cell.own] * CROWD)
            else:
                cell.own += shift
                cell.count = WITNESSES
            return
        limit = ODD * self._noise
        step = min(limit, max(-limit, off - cell.own))
        self._noise = max(LEAST_NOISE, self._noise + NOISE_RATE * (abs(step) - self._noise))
        if in_place:
            self._level += LEVEL_RATE * step
            cell.own += OWN_RATE * step
        else:
            cell.own += step * max(1 / cell.count, RETURN_RATE)

    def _is_odd(self, surprise: float) -> bool:
        return abs(surprise) > ODD * self._noise

    def _priced(self, batch: int, n: int, own: float) -> float:
        return self.forward(batch * (n + 1)) * math.exp(self._level + own)

    def _own(self, key: tuple[int, int]) -> float:
        cell = self._cells.get(key)
        if cell is not None:
            return cell.own
        if key not in self._stand_ins:
            self._stand_ins[key] = self._nearest(*key)
        stand_in = self._stand_ins[key]
        return stand_in.own if stand_in else 0.0

    def _nearest(self, bucket: int, n: int) -> _Cell | None:
        """The cell whose ratio stands in for one never seen.

        Steps that draft stand in for one another first, as all of them carry the drafter's work;
        of those the nearest bucket counts, then the nearest n.
        """

        def distance(key: tuple[int, int]) -> tuple[bool, float, float, int]:
            return (
                (key[1] > 0) != (n > 0),
                abs(math.log2(key[0] / bucket)),
                abs(math.log((key[1] + 1) / (n + 1))),
                key[1],
            )

        return self._cells[min(self._cells, key=distance)] if self._cells else None

    def _interpolate(self, tokens: int) -> float:
        right = bisect_left(self._tokens, tokens)
        if right == 0 or len(self._tokens) == 1:
            return self._times[0]
        beyond = right == len(self._tokens)
        right = min(right, len(self._tokens) - 1)
        first, last = self._times[right - 1], self._times[right]
        width = self._tokens[right] - self._tokens[right - 1]
        slope = (last - first) / width
        if beyond:
            slope = max(0.0, slope)
        return last + slope * (tokens - self._tokens[right])
