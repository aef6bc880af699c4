"""A custom logits processor with state: the tokens that it forbids depend on the output so far."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class NoParityTwice(LogitsProcessor):
    """Forbids two even or two odd output tokens in a row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.outputs, batch_update, lambda params, prompt, output: output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, output in self.outputs.items():
            if output:
                logits[row, output[-1] % 2 :: 2] = float("-inf")
        return logits
