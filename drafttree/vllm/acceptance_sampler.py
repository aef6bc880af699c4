"""vLLM's sampler with a method's acceptance rule in place of the random choice.

Processors, penalties, temperatures, greedy requests and logprobs are still handled by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

Choose = Callable[[torch.Tensor], torch.Tensor]
"""`(target float32 [B, V]) -> tokens int [B]`: chooses a token from each distribution."""


class AcceptanceSampler(Sampler):
    """A sampler in which a function chooses from the final distributions.

    Args:
        stock: The engine's own sampler, whose settings apply.
    """

    def __init__(self, stock: Sampler) -> None:
        super().__init__(stock.logprobs_mode)
        self.topk_topp_sampler = _Choice(stock.logprobs_mode)

    def choose_with(self, choose: Choose) -> None:
        """Let `choose` choose tokens from now on."""
        self.topk_topp_sampler.choose = choose


class _Choice(torch.nn.Module):
    """Replaces the engine's module that filters by top-k and top-p and draws a token."""

    choose: Choose

    def __init__(self, logprobs_mode: str) -> None:
        super().__init__()
        self._logprobs_mode = logprobs_mode

    def forward(
        self, logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `int64 [B]`, and the logits or logprobs to report if the mode asks for them."""
        logits = apply_top_k_top_p(logits, k, p)
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        reported = {"processed_logits": logits, "processed_logprobs": log_probs}
        return self.choose(log_probs.exp()).long(), reported.get(self._logprobs_mode)
