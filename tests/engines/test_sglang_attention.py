"""Tree attention on SGLang's CPU backend, compared with its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tree_kernels.mask import tree_mask

KV_HEADS, SIZE, CONTEXT = 2, 16, 7


class Pool:
    """A KV pool of one layer, `[slots, KV heads, size]`."""

    def __init__(self, slots: int, value_size: int, dtype: torch.dtype) -> None:
        self.keys = torch.randn(slots, KV_HEADS, SIZE).to(dtype)
        self.values = torch.randn(slots, KV_HEADS, value_size).to(dtype)

    def set_kv_buffer(
        self, layer: Any, where: Any, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self.keys[where.loc] = keys.to(self.keys.dtype)
        self.values[where.loc] = values.to(self.values.dtype)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("nodes", "rows"), [(1, 1), (5, 5), (5, 2)])
@pytest.mark.parametrize("window", [-1, 0, 3, 6, 9])
@pytest.mark.parametrize(
    ("value_size", "dtype"),
    [(SIZE, torch.float32), (SIZE, torch.float8_e4m3fn), (SIZE // 2, torch.float32)],
    ids=["as the query", "8 bits", "values smaller than keys"],
)
def test_nodes_attend_to_the_context_and_their_ancestors(
    group: int, nodes: int, rows: int, window: int, value_size: int, dtype: torch.dtype
) -> None:
    """The last `rows` nodes are rows of the batch."""
    from drafttree.sglang.attention import TreeAttentionBackend

    torch.manual_seed(0)
    requests, heads = 2, KV_HEADS * group
    # Slot 0 is no request's.
    table = (1 + torch.randperm(requests * (CONTEXT + nodes))).view(requests, -1).int()
    pool = Pool(1 + table.numel(), value_size, dtype)
    parents = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3]])[:, :nodes].int()
    masks = tree_mask(parents, torch.full((requests,), nodes).int())
    depth = masks.sum(2) - 1
    first = nodes - rows
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(custom_mask=masks, draft_token_num=rows),
        seq_lens=torch.full((requests,), CONTEXT),
        req_pool_indices=torch.arange(requests),
        out_cache_loc=table[:, CONTEXT + first :].flatten(),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=SIZE,
        v_head_dim=value_size,
        scaling=0.25,
        sliding_window_size=window,
    )
    backend = TreeAttentionBackend(
        SimpleNamespace(
            device="cpu",
            dtype=torch.float32,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=pool,
        )
    )
    q = torch.randn(requests * rows, heads * SIZE)
    k, v = (torch.randn(requests * rows, KV_HEADS, size) for size in (SIZE, value_size))
    backend.init_forward_metadata(batch)
    output = backend.forward_extend(q, k, v, layer, batch)
    output = output.view(requests, rows, heads, value_size)

    for request, slots in enumerate(table.long()):
        seen = F.pad(masks[request], (CONTEXT, 0), value=True)
        positions = torch.cat([torch.arange(CONTEXT), CONTEXT + depth[request]])
        if window >= 0:
            seen &= CONTEXT + depth[request][:, None] - positions <= window
        for head in range(heads):
            query = q.view(requests, rows, heads, SIZE)[request, :, head]
            scores = 0.25 * query @ pool.keys[slots, head // group].float().T
            weights = scores.masked_fill(~seen[first:], -torch.inf).softmax(-1)
            expected = weights @ pool.values[slots, head // group].float()
            torch.testing.assert_close(output[request, :, head], expected)
