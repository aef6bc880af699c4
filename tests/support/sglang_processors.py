"""A custom logit processor, as a user would write it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class NoEvenTokens(CustomLogitProcessor):
    """Allows odd tokens only."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[Any] | None) -> torch.Tensor:
        logits[:, ::2] = float("-inf")
        return logits
