"""Weights of 8 bits in SGLang on any CPU: its kernels for them, as torch operations.

SGLang multiplies them on GPUs and on CPUs with AMX, and asks CUDA which GPU it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype

VARIABLE = "TESTS_INT8_ON_CPU"

ENVIRONMENT = {VARIABLE: "1"}


def enable() -> None:
    """Let this process's engine serve linear layers in the compressed-tensors format, in 8 bits."""
    import torch
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_int8 as scheme,
    )

    config = compressed_tensors.CompressedTensorsConfig
    config._check_scheme_supported = lambda *_, **__: True
    config.get_supported_act_dtypes = lambda _: [torch.bfloat16, torch.float32]
    scheme.per_token_quant_int8 = _rounded
    scheme.int8_scaled_mm = _product


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of -127 to 127 like the rows, and the scale `[..., 1]` of each row."""
    import torch

    scales = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
    return (rows.float() / scales).round().to(torch.int8), scales


def _product(
    rows: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    out_dtype: dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of integers, which is exact, times both scales."""
    # Sums of up to a thousand products are exact in double precision.
    whole = (rows.double() @ weight.double()).float()
    scaled = whole * row_scales * column_scales.view(-1)
    return (scaled if bias is None else scaled + bias).to(out_dtype)
