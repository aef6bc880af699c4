"""Accepted tokens that a drafter's layer reads later, while nothing is drafted.

A layer reads each accepted token with the target's hidden state before it. While nothing is
drafted it need not do so in each step: it costs little more to read several tokens at a time than
to read one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from drafttree.arrays import LongArray

_STEPS = 16
"""Steps after which the layer reads their tokens."""

K = TypeVar("K", bound=Hashable)


class _Row(NamedTuple):
    hidden: torch.Tensor
    token: int
    position: int


@dataclass(frozen=True)
class TakenRows:
    """N consecutive tokens of the texts of T requests, request by request.

    Attributes:
        places: The requests' places in their batch, `int64 [T]`.
        starts: Position of the first token of each request, `int64 [T]`.
        ends: Position after the last one, `int64 [T]`.
        hidden: The target's hidden states before the tokens, `[N, d]`.
        tokens: The tokens, `int64 [N]`.
        positions: Positions of the rows, `int64 [N]`.
    """

    places: LongArray
    starts: LongArray
    ends: LongArray
    hidden: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor


class DeferredRows(Generic[K]):
    """The tokens that the layer has not read yet, by request, on a CPU."""

    def __init__(self) -> None:
        self._rows: dict[K, list[_Row]] = {}
        self._steps = 0

    def add(
        self,
        batch: Iterable[K],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> bool:
        """Defer one token of each request of a batch.

        Args:
            batch: The requests.
            hidden: The target's hidden states before the tokens, `[B, d]`.
            tokens: The tokens, `int [B]`.
            positions: Positions of the rows, `int64 [B]`.

        Returns:
            Whether they should be read now.
        """
        rows = zip(hidden.clone(), tokens.tolist(), positions.tolist(), strict=True)
        for request, row in zip(batch, rows, strict=True):
            self._rows.setdefault(request, []).append(_Row(*row))
        self._steps += 1
        return self._steps >= _STEPS

    def forget(self, requests: Iterable[K]) -> None:
        """Requests have ended, or will be read again."""
        for request in requests:
            self._rows.pop(request, None)

    def take(self, batch: Sequence[K]) -> TakenRows | None:
        """Take the deferred tokens of a batch, to be read now; None if there are none.

        Requests that are left out of a step are read when they are back.
        """
        self._steps = 0
        places = np.array([row for row, each in enumerate(batch) if each in self._rows], np.int64)
        if not len(places):
            return None
        deferred = [self._rows.pop(batch[place]) for place in places]
        rows = [row for each in deferred for row in each]
        return TakenRows(
            places,
            starts=np.array([each[0].position for each in deferred], np.int64),
            ends=np.array([each[-1].position + 1 for each in deferred], np.int64),
            hidden=torch.stack([row.hidden for row in rows]),
            tokens=torch.tensor([row.token for row in rows]),
            positions=torch.tensor([row.position for row in rows]),
        )
