"""vLLM's sampler with the draw itself left to a rule.

All else stays the host's: processors, penalties, temperatures, greedy requests, logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler


class RuleSampler(Sampler):
    """A sampler that calls `choose` with distributions, `float32 [B, V]`, to get tokens.

    Args:
        stock: the engine's own, whose settings it takes.
    """

    def __init__(self, stock: Sampler) -> None:
        super().__init__(stock.logprobs_mode)
        self.topk_topp_sampler = _Choice(stock.logprobs_mode)

    def choose(self, rule: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let `rule` choose from now on."""
        self.topk_topp_sampler.rule = rule


class _Choice(torch.nn.Module):
    """Stands where the engine's own draw stands, with the same arguments."""

    rule: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, logprobs_mode: str) -> None:
        super().__init__()
        self._logprobs_mode = logprobs_mode

    def forward(
        self, logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = apply_top_k_top_p(logits, k, p)
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        shown = {"processed_logits": logits, "processed_logprobs": log_probs}
        return self.rule(log_probs.exp()).long(), shown.get(self._logprobs_mode)
