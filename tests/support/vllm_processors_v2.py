"""A custom logits processor for the V2 model runner, which reads the requests' texts."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor


class NoneOfTheLastFour(LogitsProcessor):
    """Forbids the last four tokens of the text, draft tokens included."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states

    def apply(self, logits: Any, ctx: Any) -> Any:
        rows = zip(ctx.expanded_idx_mapping.tolist(), ctx.expanded_local_pos.tolist(), strict=True)
        for row, (slot, column) in enumerate(rows):
            length = int(self._states.total_len.gpu[slot])
            text = self._states.all_token_ids.gpu[slot, :length].tolist()
            text += ctx.input_ids[row + 1 - column : row + 1].tolist()
            logits[row, text[-4:]] = float("-inf")
        return logits
