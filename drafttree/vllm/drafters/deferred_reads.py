"""Accepted tokens that a drafter's layer reads later, while nothing is drafted.

A layer reads each accepted token with the target's hidden state before it. While nothing is
drafted it need not do so in each step: it costs little more to read several tokens at a time than
to read one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from drafttree.drafter import HiddenStateDrafter
from drafttree.vllm.drafters.draft_layer import LAYER, DraftLayer
from drafttree.vllm.drafters.text_rows import TextRows

_STEPS = 16
"""Steps after which the layer reads their tokens."""


class _Row(NamedTuple):
    hidden: torch.Tensor
    token: int
    position: int


class DeferredReads:
    """The tokens that the layer has not read yet, by request, on a CPU.

    Args:
        runner: The model runner, whose KV caches exist.
        drafter: The drafter.
        layer: Its layer.
    """

    def __init__(self, runner: Any, drafter: HiddenStateDrafter, layer: DraftLayer) -> None:
        self._runner = runner
        self._drafter = drafter
        self._layer = layer
        self._texts = TextRows(runner, LAYER)
        self._rows: dict[str, list[_Row]] = {}
        self._steps = 0

    def add(self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> bool:
        """Defer one token of each request of the batch.

        Args:
            hidden: The target's hidden states before the tokens, `[B, d]`.
            tokens: The tokens, `int [B]`.
            positions: Positions of the rows, `int64 [B]`.

        Returns:
            Whether they should be read now.
        """
        names = self._runner.input_batch.req_ids
        rows = zip(hidden.clone(), tokens.tolist(), positions.tolist(), strict=True)
        for name, row in zip(names, rows, strict=True):
            self._rows.setdefault(name, []).append(_Row(*row))
        self._steps += 1
        return self._steps >= _STEPS

    def forget(self, names: Iterable[str]) -> None:
        """Requests have ended, or will be read again."""
        for name in names:
            self._rows.pop(name, None)

    def read(self, slots: torch.Tensor) -> None:
        """Let the layer read them, within a step.

        Args:
            slots: Slots of the batch's requests, `int64 [B]`.
        """
        batch: Sequence[str] = self._runner.input_batch.req_ids
        # Requests that are left out of a step are read when they are back.
        places = np.array([row for row, name in enumerate(batch) if name in self._rows], np.int64)
        self._steps = 0
        if not len(places):
            return
        deferred = [self._rows.pop(batch[place]) for place in places]
        rows = [row for each in deferred for row in each]
        starts = np.array([each[0].position for each in deferred], np.int64)
        ends = np.array([each[-1].position + 1 for each in deferred], np.int64)
        tokens = torch.tensor([row.token for row in rows])
        x = self._drafter.fuse(torch.stack([row.hidden for row in rows]), tokens)
        positions = torch.tensor([row.position for row in rows])
        with self._texts.reading(places, starts, ends):
            states = self._drafter.layer(x, positions, self._layer.attend)
        last = torch.from_numpy((ends - starts).cumsum() - 1)
        stored = self._layer.states
        stored[slots[torch.from_numpy(places)]] = states[last].to(stored.dtype)
