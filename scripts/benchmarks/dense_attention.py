"""Attention of draft trees with PyTorch's own kernels, over contiguous keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import budget_tree, parents_of
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from tree_kernels import mask


def flash_beside_tree(query: Tensor, keys: Tensor, values: Tensor, tree_mask: Tensor) -> Tensor:
    """Attention to the context with PyTorch's flash kernel, merged with attention to the tree.

    Args:
        query: `[B, K, G * N, D]`, the G query heads of a KV head one after another.
        keys: `[B, K, C + N, D]`, the context's keys and then the tree's.
        values: `[B, K, C + N, D]`, the context's values and then the tree's.
        tree_mask: `bool [G * N, N]`, whether a row attends to a node.
    """
    context = keys.shape[2] - tree_mask.shape[1]
    aten = torch.ops.aten
    on_cpu = query.device.type == "cpu"
    flash = (
        aten._scaled_dot_product_flash_attention_for_cpu
        if on_cpu
        else aten._scaled_dot_product_flash_attention
    )
    before, before_sum = flash(query, keys[:, :, :context], values[:, :, :context])[:2]
    scores = (query @ keys[:, :, context:].mT).float() * query.shape[3] ** -0.5
    scores = scores.masked_fill(~tree_mask, -torch.inf)
    tree_sum = scores.logsumexp(-1)
    tree = (scores - tree_sum[..., None]).exp().to(values.dtype) @ values[:, :, context:]
    share = torch.sigmoid(before_sum - tree_sum)[..., None]
    return (before * share + tree * (1 - share)).to(query.dtype)


def dense(
    requests: int,
    tree_size: int,
    context: int,
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
) -> dict[str, Callable[[], object]]:
    """PyTorch's implementations of the same attention by name, over contiguous keys and values."""
    query_heads, kv_heads = heads
    group, length = query_heads // kv_heads, context + tree_size
    query = torch.randn(requests, query_heads, tree_size, size, dtype=dtype)
    keys, values = torch.randn(2, requests, kv_heads, length, size, dtype=dtype).unbind()
    # The query heads of a group become rows, so that KV is read once.
    folded = query.view(requests, kv_heads, group * tree_size, size)
    tree = mask.tree_mask(*parents_of(budget_tree(tree_size), 1))[0].repeat(group, 1)
    whole_mask = torch.ones(group * tree_size, length, dtype=torch.bool)
    whole_mask[:, context:] = tree
    causal: Any = causal_lower_right(tree_size, length)
    return {
        "dense sdpa with a mask": lambda: F.scaled_dot_product_attention(
            folded, keys, values, whole_mask
        ),
        "dense flash, the tree beside it": lambda: flash_beside_tree(folded, keys, values, tree),
        "dense sdpa, causal": lambda: F.scaled_dot_product_attention(
            query, keys, values, causal, enable_gqa=True
        ),
    }
