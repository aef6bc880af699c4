"""What trees are worth at several sizes, by the scores of their nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad


def expected_tokens(scores: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Tokens that each request is expected to emit with its best nodes; the host waits for nothing.

    Args:
        scores: `float [B, F]`, the probability that each node is accepted, roots left out; 0 where
            there is no node.
        sizes: Numbers of draft tokens, ascending from 0.

    Returns:
        `float32 [B, S]`, the bonus token included.
    """
    most = min(sizes[-1], scores.shape[1])
    sums = scores.float().topk(most, dim=1).values.cumsum(1)
    sums = pad(sums, (1, 0))
    return 1 + torch.stack([sums[:, min(size, most)] for size in sizes], 1)
