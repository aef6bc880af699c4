"""The texts that a draft model has not read, because nothing was drafted.

A draft model whose drafts do not pay would cost time in each step only to be ready. So it reads
nothing while nothing is drafted, and reads what it has missed when drafts are asked for.

What it has read is known by KV slot, not by request: cached prefixes, preempted requests and slots
that are used again need no care.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from drafttree.arrays import LongArray

ROWS = 512
"""Most tokens that are read in one forward."""

Texts = Iterable[tuple[int, int]]
"""The host's number of each request, and the length of its text."""


class UnreadTexts(ABC):
    """Knows which tokens' KV the draft model has computed, on a CPU.

    Args:
        num_slots: Number of KV slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._is_read = np.zeros(num_slots, np.bool_)

    @abstractmethod
    def _slots(self, request: int, start: int, end: int) -> LongArray:
        """KV slots of a request's tokens from `start` to `end`, which is not included."""

    @abstractmethod
    def _forward(self, request: int, start: int, end: int) -> None:
        """Let the draft model read these tokens."""

    def written(self, slots: LongArray, *, read: bool) -> None:
        """Note that a step computes the KV of tokens.

        Args:
            slots: Their slots, `int64`.
            read: Whether the draft model reads them.
        """
        self._is_read[slots] = read

    def count(self, texts: Texts) -> int:
        """How many tokens of the texts are to be read."""
        return sum(end - start for _, start, end in self._unread(texts))

    def read(self, texts: Texts) -> int:
        """Let the draft model read the texts, and return the number of tokens that it read."""
        unread = self._unread(texts)
        for request, start, end in unread:
            # One request after the other: as a rule one of them is long, or all are short.
            for first in range(start, end, ROWS):
                self._forward(request, first, min(first + ROWS, end))
            self._is_read[self._slots(request, start, end)] = True
        return sum(end - start for _, start, end in unread)

    def _unread(self, texts: Texts) -> list[tuple[int, int, int]]:
        """The requests whose texts are not read to the end: number, first position and end."""
        found = []
        for request, length in texts:
            unread = np.flatnonzero(~self._is_read[self._slots(request, 0, length)])
            if len(unread):
                found.append((request, int(unread[0]), length))
        return found
