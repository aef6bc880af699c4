"""vLLM's own causal kernels, beside which attention of trees is timed where vLLM is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor


def causal_ways(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: tuple[int, int],
) -> dict[str, Callable[[], object]]:
    """The engine's calls for as many tokens as the trees have nodes, by name; none on a CPU.

    Args:
        query: `[T, Hq, D]`.
        keys: `[pages, page, Hkv, D]`, as values.
        table: int32 `[B, P]`, each request's pages.
        starts: int32 `[B + 1]`, its rows.
        lengths: int32 `[B]`, its tokens.
        longest: its rows and its tokens, at most.
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
    ways: dict[str, Callable[[], object]] = {
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
        ways["vLLM's flash, causal"] = partial(flash_attn_varlen_func, **common, fa_version=3)
    return ways
