"""SGLang's sampler with the draw itself replaced by an acceptance rule.

Custom processors, temperatures, greedy requests and logprobs are still handled by SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec

from drafttree.acceptance_rules import AcceptanceRule


class AcceptanceSampler(Sampler):
    """Draws as SGLang does, except inside `using`."""

    _rule: AcceptanceRule | None = None
    _nodes: torch.Tensor | None = None

    @contextmanager
    def using(self, rule: AcceptanceRule | None, nodes: torch.Tensor) -> Iterator[None]:
        """Let a rule choose the tokens that are sampled inside the block.

        Args:
            rule: The rule; None leaves the draw to SGLang.
            nodes: `int32 [B]`, the node of each request after which a token is sampled.
        """
        self._rule, self._nodes = rule, nodes
        try:
            yield
        finally:
            self._rule = self._nodes = None

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, *given: Any
    ) -> tuple[torch.Tensor, Any]:
        if self._rule is None or self._nodes is None:
            drawn: tuple[torch.Tensor, Any] = super()._sample_from_probs(
                probs, sampling_info, *given
            )
            return drawn
        return self._rule(filter_probs(probs.float(), sampling_info), self._nodes).long(), None

    def _sample_from_logprobs(
        self, logprobs: torch.Tensor, sampling_info: Any, *given: Any
    ) -> torch.Tensor:
        if self._rule is None or self._nodes is None:
            drawn: torch.Tensor = super()._sample_from_logprobs(logprobs, sampling_info, *given)
            return drawn
        # SGLang draws from these, of bfloat16, with `rl_on_policy_target`. Their sum is not 1.
        return self._rule(logprobs.float().softmax(-1), self._nodes)


def filter_probs(probs: torch.Tensor, info: Any) -> torch.Tensor:
    """Apply top-k, top-p and min-p as SGLang's own sampler does.

    As a rule top-p counts by the probabilities as they are. Where a request of the batch has min-p,
    FlashInfer's kernels, with which SGLang samples on a GPU, renormalise after top-k, so that top-p
    counts by what top-k has left.

    Args:
        probs: `float32 [B, V]`, or `[B, n, V]` with n distributions per request.
        info: SGLang's sampling parameters of the batch.

    Returns:
        Filtered and renormalised distributions, float32 of the same shape.
    """
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return probs
    by_request = (-1, *[1] * (probs.dim() - 1))
    count = min(info.max_top_k or probs.shape[-1], probs.shape[-1])
    best, tokens = probs.topk(count)
    before = best.cumsum(-1) - best
    kept = torch.arange(count, device=probs.device) < info.top_ks.view(by_request)
    top_ps = info.top_ps.view(by_request)
    if info.need_min_p_sampling and get_exec().kernel.sampling_backend == "flashinfer":
        top_ps = top_ps * (best * kept).sum(-1, keepdim=True)
    kept = kept & (before <= top_ps)
    if info.need_min_p_sampling:
        kept = kept & (best >= best[..., :1] * info.min_ps.view(by_request))
    left = best * kept
    return torch.zeros_like(probs).scatter_(-1, tokens, left / left.sum(-1, keepdim=True))
