"""The tokens of a batch that another kernel has attended to before `tree_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels.attention_variant import AttentionVariant


@dataclass(frozen=True)
class Prefix:
    """The first tokens of each request, all of which every row of the request attends to.

    Attributes:
        lengths: Number of these tokens, int32 `[B]`; at most those before the request's rows and
            before its tree's root, and 0 for none.
        log_sums: Natural logarithm of the sum of the exponentials of their scores, float32
            `[H, T]`, for each query head and row; infinite or NaN for a row without such tokens.
    """

    lengths: Tensor
    log_sums: Tensor

    def check(self, query: Tensor, requests: int, variant: AttentionVariant) -> None:
        """Check that this is the prefix of a batch.

        Args:
            query: `[T, H, D]`.
            requests: Number of requests.
            variant: How the attention differs from softmax attention to all tokens.

        Raises:
            ValueError: Shapes, types or strides do not fit, or the variant allows no prefix.
        """
        if variant.window or variant.kv_scales is not None:
            raise ValueError("a window, or a cache in FP8, allows no prefix")
        rows, heads = query.shape[:2]
        if (
            self.lengths.shape != (requests,)
            or self.lengths.dtype != torch.int32
            or self.log_sums.shape != (heads, rows)
            or self.log_sums.dtype != torch.float32
        ):
            found = [(each.dtype, [*each.shape]) for each in (self.lengths, self.log_sums)]
            raise ValueError(
                f"a prefix is int32 [{requests}] and float32 [{heads}, {rows}], not {found}"
            )
        if any(each.stride(-1) != 1 for each in (self.lengths, self.log_sums) if each.numel()):
            raise ValueError("the last dimension of every tensor must be contiguous")
