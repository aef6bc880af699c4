"""What some models change about softmax attention: sliding windows, soft caps and sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionVariant:
    """How a layer's attention differs from plain softmax attention.

    Attributes:
        window: A token attends to the `window` last positions up to its own; 0 for all. The
            position of a tree's node is its depth below the root.
        soft_cap: Scaled scores s become `soft_cap * tanh(s / soft_cap)` (Gemma 2, arXiv
            2408.00118); 0 for none.
        sinks: `[H]`, for each query head a score without a value, which takes a share of the
            softmax (gpt-oss, arXiv 2508.10925); None for none.
        kv_scales: Factors of the keys and of the values in a cache of 8-bit floats, float32
            scalars; None for a cache of the query's type.
    """

    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    kv_scales: tuple[Tensor, Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are neither capped nor compared with sinks."""
        return self.soft_cap == 0 and self.sinks is None

    def weights(
        self, scores: Tensor, hidden: Tensor, log_sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The softmax of scores; zero for a row that attends to nothing.

        Args:
            scores: Scaled scores, float32 `[H, R, T]`.
            hidden: Whether a row does not attend to a token, bool `[R, T]`.
            log_sums: Logarithms of the sums of the exponentials of a row's scores of other tokens,
                `[H, R]`, not finite where there are none; None for no other tokens.

        Returns:
            The weights `[H, R, T]`, and the sum of the other tokens' `[H, R]`; None without such.
        """
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        heads, rows, tokens = scores.shape
        hidden = hidden.expand(heads, rows, tokens)
        if log_sums is not None:
            scores = torch.cat((scores, log_sums[..., None]), 2)
            hidden = torch.cat((hidden, ~log_sums.isfinite()[..., None]), 2)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(-1, rows, 1)
            scores = torch.cat((scores, sinks), 2)
        weights = scores.softmax(2)[:, :, : hidden.shape[2]].masked_fill(hidden, 0.0)
        return weights[:, :, :tokens], None if log_sums is None else weights[:, :, tokens]


PLAIN = AttentionVariant()
"""Softmax attention to all tokens."""
