"""Products with weights of which many steps multiply a few rows each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

# As torch's compiler packs constant weights; builds without oneDNN do not have these.
_OPERATORS = "_reorder_linear_weight", "_linear_pointwise"

_ROWS = 8
"""Rows for which weights are packed; any number can be multiplied."""


class Linear:
    """`x W^T + b`, for inference alone.

    On a CPU, oneDNN reads weights in a blocked layout. torch reorders plain weights of bfloat16 in
    each product, which takes longer than a product of a few rows, and multiplies those of float32
    without oneDNN, which is slower; here they are reordered once. Where the CPU has no products of
    16-bit numbers, torch computes them row by row. More rows than one are multiplied in float32
    then: 256 rows take an eighth of the time.

    Args:
        weight: `[N, K]`.
        bias: `[N]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        dtype = _packed_dtype(weight)
        self._packed = None if dtype is None else _Packed(weight.to(dtype), bias)
        # Packed in the same data type, the weights are needed once.
        self._plain = None if dtype == weight.dtype else (weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, in the data type of `x`."""
        has_one_row = x.numel() == x.shape[-1]
        if self._packed is None or (self._plain is not None and has_one_row):
            assert self._plain is not None
            return linear(x, *self._plain)
        return self._packed(x)


class _Packed:
    """A product with weights in oneDNN's layout, computed in their data type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._dtype = weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise
        result: Tensor = product(x.to(self._dtype), self._weight, self._bias, "none", [], "")
        return result.to(x.dtype)


def _packed_dtype(weight: Tensor) -> torch.dtype | None:
    """The data type in which weights are packed for oneDNN; None if they are not."""
    if weight.device.type != "cpu" or not all(hasattr(torch.ops.mkldnn, n) for n in _OPERATORS):
        return None
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    if weight.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None  # not measured
    return torch.float32
