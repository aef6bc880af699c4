"""SGLang's sampler with the draw itself left to a rule.

All else stays the host's: custom processors, temperatures, greedy requests, logprobs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler

from drafttree.sglang.versions import unknown

SIGNATURE = ["self", "probs", "sampling_info", "positions", "simple_sampling_case"]


class RuleSampler(Sampler):
    """Calls `choose` with the distributions, `float32 [B, V]`, to get the tokens, `int32 [B]`.

    Raises:
        RuntimeError: this is not the SGLang that we know.
    """

    choose: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        found = list(inspect.signature(Sampler._sample_from_probs).parameters)
        if found != SIGNATURE:
            raise unknown(f"Sampler._sample_from_probs takes {found}, expected {SIGNATURE}")
        super().__init__()

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, *_: Any
    ) -> tuple[torch.Tensor, None]:
        return self.choose(filter_probs(probs.float(), sampling_info)).long(), None


def filter_probs(probs: torch.Tensor, info: Any) -> torch.Tensor:
    """What top-k, top-p and min-p leave, by the same comparisons as the host's own sampler.

    Args:
        probs: float32 `[B, V]`, or `[B, n, V]` with n distributions a request.
        info: the batch's sampling parameters.

    Returns:
        float32 of the same shape, each distribution's sum 1.
    """
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return probs
    by_request = (-1, *[1] * (probs.dim() - 1))
    count = min(info.max_top_k or probs.shape[-1], probs.shape[-1])
    best, tokens = probs.topk(count)
    before = best.cumsum(-1) - best
    kept = torch.arange(count, device=probs.device) < info.top_ks.view(by_request)
    kept = kept & (before <= info.top_ps.view(by_request))
    if info.need_min_p_sampling:
        kept = kept & (best >= best[..., :1] * info.min_ps.view(by_request))
    left = best * kept
    return torch.zeros_like(probs).scatter_(-1, tokens, left / left.sum(-1, keepdim=True))
