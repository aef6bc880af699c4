"""The texts of SGLang's requests that a draft model has not read."""

from __future__ import annotations

from typing import Any

import torch

from drafttree.arrays import LongArray
from drafttree.sglang.adapters import use_no_adapters
from drafttree.unread_texts import UnreadTexts


class DraftModelTexts(UnreadTexts):
    """Knows which tokens' KV the draft model has computed; requests are numbered by their slots.

    Args:
        runner: The draft model's runner, with its memory pools.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._table = runner.req_to_token_pool.req_to_token
        self._requests: dict[int, Any] = {}
        allocator = runner.token_to_kv_pool_allocator
        # SGLang uses a page more, for padding.
        super().__init__(allocator.size + allocator.page_size)

    def start(self, slot: int, request: Any) -> None:
        """A request starts in a slot."""
        self._requests[slot] = request

    def _slots(self, request: int, start: int, end: int) -> LongArray:
        slots: LongArray = self._table[request, start:end].long().numpy()
        return slots

    def _forward(self, request: int, start: int, end: int) -> None:
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        of_request = self._requests[request]
        text = [*of_request.origin_input_ids, *of_request.output_ids]
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=torch.tensor(text[start:end]),
            req_pool_indices=torch.tensor([request]),
            seq_lens=torch.tensor([end]),
            out_cache_loc=torch.from_numpy(self._slots(request, start, end)),
            seq_lens_sum=end,
            positions=torch.arange(start, end),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        batch.extend_prefix_lens = torch.tensor([start])
        batch.extend_seq_lens = torch.tensor([end - start])
        batch.extend_seq_lens_cpu = [end - start]
        use_no_adapters(self._runner, batch)
        self._runner.forward(batch)
