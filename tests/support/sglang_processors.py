"""A custom logit processor of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class NoEvenTokens(CustomLogitProcessor):
    """Allows odd tokens alone."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[Any] | None) -> torch.Tensor:
        logits[:, ::2] = float("-inf")
        return logits
