"""The texts that a draft model has not read, because nothing was drafted.

A draft model whose drafts do not pay would cost time in each step only to be ready. So it reads
nothing while nothing is drafted, and reads what it has missed when drafts are asked for.

What it has read is known by KV slot, not by request: cached prefixes, preempted requests and slots
that are used again need no care.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from drafttree.vllm.arrays import LongArray
from drafttree.vllm.drafters.draft_model_loader import PREFIX
from drafttree.vllm.drafters.text_rows import TextRows

_ROWS = 512
"""Most tokens that are read in one forward."""


class UnreadTexts:
    """Knows which tokens' KV the draft model has computed, on a CPU.

    Args:
        runner: The model runner, whose KV caches exist.
        model: The draft model.
    """

    def __init__(self, runner: Any, model: Any) -> None:
        self._runner = runner
        self._model = model
        self._texts = TextRows(runner, PREFIX)
        self._is_read = np.zeros(self._texts.num_slots, np.bool_)

    def written(self, rows: int, *, read: bool) -> None:
        """Note that a step computes the KV of its tokens.

        Args:
            rows: Number of the step's tokens.
            read: Whether the draft model reads them.
        """
        self._is_read[self._texts.slots_of_step(rows)] = read

    def count(self, lengths: LongArray) -> int:
        """How many tokens are to be read of texts of these lengths, `int64 [B]`."""
        return sum(end - start for _, start, end in self._unread(lengths))

    def read(self, lengths: LongArray) -> int:
        """Let the draft model read texts up to these lengths, `int64 [B]`, within a step.

        Returns:
            The number of tokens that were read.
        """
        unread = self._unread(lengths)
        for request, start, end in unread:
            # One request after the other: as a rule one of them is long, or all are short.
            for first in range(start, end, _ROWS):
                self._forward(request, first, min(first + _ROWS, end))
            self._is_read[self._texts.slots(request, start, end)] = True
        return sum(end - start for _, start, end in unread)

    def _unread(self, lengths: LongArray) -> list[tuple[int, int, int]]:
        """The requests whose texts are not read to the end: row, first position and end."""
        found = []
        for request, length in enumerate(lengths.tolist()):
            unread = np.flatnonzero(~self._is_read[self._texts.slots(request, 0, length)])
            if len(unread):
                found.append((request, int(unread[0]), length))
        return found

    def _forward(self, request: int, start: int, end: int) -> None:
        tokens = self._runner.input_batch.token_ids_cpu[request, start:end]
        with self._texts.reading(*(np.array([each]) for each in (request, start, end))):
            self._model(
                input_ids=torch.from_numpy(tokens.astype(np.int64)),
                positions=torch.arange(start, end),
            )
