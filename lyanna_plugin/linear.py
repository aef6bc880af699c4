"""Products with the draft layer's weights, which many steps read with a few rows each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """`x W^T + b`, for inference alone.

    On a CPU, oneDNN's bfloat16 products read weights in a blocked layout. torch reorders plain
    weights in each product, which takes longer than a product of a few rows; here it is done once.

    Args:
        weight: `[N, K]`.
        bias: `[N]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._is_packed = _packs(weight)
        self._weight = _packed(weight) if self._is_packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`."""
        if self._is_packed:
            product = torch.ops.mkldnn._linear_pointwise
            result: Tensor = product(x, self._weight, self._bias, "none", [], "")
            return result
        return linear(x, self._weight, self._bias)


def _packs(weight: Tensor) -> bool:
    """Whether torch reorders these weights for oneDNN."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    # As torch's compiler packs constant weights; builds without oneDNN do not have these.
    operators = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(operators, name) for name in names) and bool(
        operators._is_mkldnn_bf16_supported()
    )


def _packed(weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
    return result
