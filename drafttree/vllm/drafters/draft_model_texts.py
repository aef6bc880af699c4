"""The texts of vLLM's batch that a draft model has not read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from drafttree.arrays import LongArray
from drafttree.unread_texts import UnreadTexts
from drafttree.vllm.drafters.draft_graphs import DraftGraphs
from drafttree.vllm.drafters.draft_model_loader import PREFIX
from drafttree.vllm.drafters.text_rows import TextRows


class DraftModelTexts(UnreadTexts):
    """Knows which tokens' KV the draft model has computed; requests are rows of the batch.

    Args:
        runner: The model runner, whose KV caches exist.
        model: Runs the draft model.
    """

    def __init__(self, runner: Any, model: DraftGraphs) -> None:
        self._runner = runner
        self._model = model
        self._texts = TextRows(runner, PREFIX)
        super().__init__(self._texts.num_slots)

    def step_written(self, rows: int, *, read: bool) -> None:
        """Note that a step computes the KV of its tokens.

        Args:
            rows: Number of the step's tokens.
            read: Whether the draft model reads them.
        """
        self.written(self._texts.slots_of_step(rows), read=read)

    def _slots(self, request: int, start: int, end: int) -> LongArray:
        return self._texts.slots(request, start, end)

    def _forward(self, request: int, start: int, end: int) -> None:
        tokens = self._runner.input_batch.token_ids_cpu[request, start:end]
        positions = torch.arange(start, end)
        one, count = np.array([request]), np.array([end - start])
        with self._runner.step_parts(PREFIX).reading_before(one, count, positions):
            self._model.forward(torch.from_numpy(tokens), positions)
