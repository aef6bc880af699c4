"""Accepted tokens that a drafter's layer reads later, while it does not draft.

A layer reads each accepted token with the target's hidden state before it. While it does not draft
it need not do so in each step: it costs little more to read several tokens at a time than to read
one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from drafttree.arrays import LongArray
from drafttree.transfer import all_on_device, on_device

_STEPS = 32
"""Steps after which the layer reads their tokens. If an answer ends before, they are never read."""
_STEPS_OF_MANY = 16
_MANY = 512
"""Steps after which the layer reads at least `_MANY` tokens: more at a time save little."""

K = TypeVar("K", bound=Hashable)


class _Rows(NamedTuple):
    hidden: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class TakenRows:
    """N consecutive tokens of the texts of T requests, request by request.

    Attributes:
        places: The requests' places in their batch, `int64 [T]`, on the host.
        counts: Number of tokens of each request, `int64 [T]`, on the host.
        last: The row of the last token of each request, `int64 [T]`.
        hidden: The target's hidden states before the tokens, `[N, d]`.
        tokens: The tokens, `int64 [N]`.
        positions: Positions of the rows, `int64 [N]`.
    """

    places: LongArray
    counts: LongArray
    last: torch.Tensor
    hidden: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor


class DeferredRows(Generic[K]):
    """The tokens that the layer has not read yet, by request.

    How many there are is known on the host, which waits for none of them.
    """

    def __init__(self) -> None:
        # Each request's rows among all that are kept, which are those of one step after another.
        self._rows: dict[K, list[int]] = {}
        self._kept: list[_Rows] = []
        self._num_kept = 0
        self._steps = 0
        self._added = 0  # tokens since the last `take`

    def add(
        self,
        requests: Iterable[K],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> bool:
        """Defer the N tokens that were accepted in a step, those of each request in their order.

        Args:
            requests: The request of each token.
            hidden: The target's hidden states before the tokens, `[N, d]`.
            tokens: The tokens, `int [N]`.
            positions: Positions of the rows, `int64 [N]`.

        Returns:
            Whether they should be read now.
        """
        for row, request in enumerate(requests, self._num_kept):
            self._rows.setdefault(request, []).append(row)
        self._kept.append(_Rows(hidden.clone(), tokens.long(), positions.clone()))
        self._num_kept += len(hidden)
        self._steps += 1
        self._added += len(hidden)
        return self._steps >= (_STEPS_OF_MANY if self._added >= _MANY else _STEPS)

    def forget(self, requests: Iterable[K]) -> None:
        """Requests have ended, or will be read again."""
        for request in requests:
            self._rows.pop(request, None)

    def take(self, batch: Sequence[K]) -> TakenRows | None:
        """Take the deferred tokens of a batch, to be read now; None if there are none.

        Requests that are left out of a step are read when they are back.
        """
        self._steps = self._added = 0
        places = np.array([row for row, each in enumerate(batch) if each in self._rows], np.int64)
        if not len(places):
            if not self._rows:
                self._kept.clear()
                self._num_kept = 0
            return None
        taken = [self._rows.pop(batch[place]) for place in places]
        counts = np.array([len(each) for each in taken], np.int64)
        rows = _Rows(*(torch.cat(each) for each in zip(*self._kept, strict=True)))
        indices, last = all_on_device(
            [np.array([*chain(*taken)], np.int64), counts.cumsum() - 1], rows.hidden.device
        )
        self._keep(rows)
        return TakenRows(places, counts, last, *(each[indices] for each in rows))

    def _keep(self, rows: _Rows) -> None:
        """Keep those of all rows that no request has taken."""
        left = [*chain(*self._rows.values())]
        self._kept.clear()
        self._num_kept = len(left)
        if left:
            indices = on_device(np.array(left, np.int64), rows.hidden.device)
            self._kept.append(_Rows(*(each[indices] for each in rows)))
        numbers = iter(range(len(left)))
        self._rows = {
            request: [next(numbers) for _ in of_request]
            for request, of_request in self._rows.items()
        }
