"""vLLM's own causal kernels, which are timed beside tree attention where vLLM is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor


def causal_kernels(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: tuple[int, int],
) -> dict[str, Callable[[], object]]:
    """vLLM's kernels by name, called for as many tokens as the trees have nodes; none on a CPU.

    Args:
        query: Queries, `[T, Hq, D]`.
        keys: Cached keys, `[pages, page, Hkv, D]`.
        values: Cached values, `[pages, page, Hkv, D]`.
        table: Pages of each request, `int32 [B, P]`.
        starts: First row of each request, and the number of rows, `int32 [B + 1]`.
        lengths: Number of tokens of each request, `int32 [B]`.
        longest: Greatest number of rows and of tokens of a request.
    """
    if not query.is_cuda:
        return {}
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return {}
    common = {
        "q": query,
        "k": keys,
        "v": values,
        "out": query.new_empty(query.shape),
        "cu_seqlens_q": starts,
        "max_seqlen_q": longest[0],
        "seqused_k": lengths,
        "max_seqlen_k": longest[1],
        "softmax_scale": query.shape[2] ** -0.5,
        "causal": True,
        "block_table": table,
    }
    kernels: dict[str, Callable[[], object]] = {
        "vLLM's Triton, causal": partial(
            unified_attention,
            **common,
            window_size=(-1, -1),
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
    }
    if is_fa_version_supported(3):
        kernels["vLLM's flash, causal"] = partial(flash_attn_varlen_func, **common, fa_version=3)
    return kernels
