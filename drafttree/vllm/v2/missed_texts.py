"""What a draft model has not read of the texts on the V2 model runner, as nothing was drafted.

As `UnreadTexts`, for a host that does not know where a text ends: tokens that were drafted may have
been rejected on the device. But a step without drafts computes exactly the tokens that were
scheduled. So it is known how many tokens a request's draft model has missed, and they are the last
ones before the step's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from drafttree.arrays import LongArray
from drafttree.unread_texts import ROWS


class MissedTexts:
    """Counts the tokens that the draft model has missed, by the request's row in the engine.

    A request may begin with blocks of KV of another one, whose tokens were missed. Of these it is
    known where they begin at the earliest.

    Args:
        requests: Number of rows.
        block_size: Tokens of a block of the KV cache.
        num_blocks: Number of blocks.
    """

    def __init__(self, requests: int, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._missed = np.zeros(requests, np.int64)
        self._first = np.zeros(requests, np.int64)
        self._blocks: list[list[int]] = [[] for _ in range(requests)]
        # Whether a block may have tokens that were missed. For running requests it is brought up to
        # date when another one starts; `_noted` is the number of blocks for which that is done.
        self._behind = np.zeros(num_blocks, np.bool_)
        self._noted = np.zeros(requests, np.int64)
        # Of the requests that start in the coming step, by row: the tokens that were found in the
        # cache, and how many of these were missed before.
        self._started: dict[int, tuple[int, int]] = {}

    def start(self, row: int, blocks: Sequence[int], computed: int) -> None:
        """A request starts, or starts again after preemption.

        Args:
            row: Its row.
            blocks: Its blocks.
            computed: Tokens whose KV the cache has.
        """
        num_found = -(-computed // self._block_size)
        self._blocks[row], self._missed[row] = [*blocks[:num_found]], 0
        self._missed[row] = missed = self._missed_of_found(row, computed)
        self._first[row] = computed - missed
        self._started[row] = computed, missed
        self.append(row, blocks[num_found:])

    def append(self, row: int, blocks: Sequence[int]) -> None:
        """A request has more blocks, of which nothing has been computed."""
        self._blocks[row] += blocks
        self._behind[[*blocks]] = False

    def stop(self, row: int) -> None:
        """The request in a row has ended, or is preempted."""
        if self._missed[row]:
            self._note(row)
        self._missed[row], self._noted[row], self._blocks[row] = 0, 0, []
        self._started.pop(row, None)

    def miss(self, rows: LongArray, counts: LongArray, earliest: LongArray) -> None:
        """A step without drafts computes tokens that the draft model does not read.

        Args:
            rows: The rows of its requests, `int64 [B]`.
            counts: Number of tokens of each, `int64 [B]`.
            earliest: The first position at which they may be, `int64 [B]`.
        """
        new = self._missed[rows] == 0
        self._first[rows[new]] = earliest[new]
        self._missed[rows] += counts
        # A request may have found blocks that are computed in the same step.
        for row, (computed, known) in self._started.items():
            missed = self._missed_of_found(row, computed)
            self._missed[row] += missed - known
            self._first[row] = min(self._first[row], computed - missed)
        self._started.clear()

    def of(self, rows: LongArray) -> LongArray:
        """How many tokens were missed of each request, `int64 [B]`."""
        missed: LongArray = self._missed[rows]
        return missed

    def read(self, rows: LongArray) -> None:
        """The draft model has read the texts of these requests up to the step, and the step."""
        for row in rows[self._missed[rows] > 0].tolist():
            self._behind[self._blocks[row]] = False
        self._missed[rows] = self._noted[rows] = 0
        self._started.clear()

    def _missed_of_found(self, row: int, computed: int) -> int:
        """How many of a request's first tokens, which were found in the cache, have been missed.

        They are those from the first block on that may have some.
        """
        # A block that is found in part is a copy, of which nothing is known.
        whole = computed // self._block_size
        if not whole:
            return computed
        for other in np.flatnonzero(self._missed).tolist():
            if other != row:
                self._note(other)
        behind = np.flatnonzero(self._behind[self._blocks[row][:whole]])
        first = int(behind[0]) if len(behind) else whole
        return computed - first * self._block_size

    def _note(self, row: int) -> None:
        """Note which blocks of a request may have tokens that were missed."""
        blocks = self._blocks[row]
        first = max(self._first[row] // self._block_size, self._noted[row])
        self._behind[blocks[first:]] = True
        self._noted[row] = len(blocks)


def pieces(missed: LongArray) -> Iterator[tuple[LongArray, LongArray, LongArray]]:
    """Divide what was missed into forwards of a bounded number of tokens.

    Args:
        missed: Number of tokens of each request, `int64 [B]`.

    Yields:
        The requests of a forward, how many tokens each has still missed before it, and how many of
        these it reads; three times `int64 [R]`.
    """
    ends = missed.cumsum()
    starts = ends - missed
    for first in range(0, int(ends[-1]), ROWS):
        begins, stops = starts.clip(first, first + ROWS), ends.clip(first, first + ROWS)
        places = np.flatnonzero(stops > begins)
        yield places, (ends - begins)[places], (stops - begins)[places]
