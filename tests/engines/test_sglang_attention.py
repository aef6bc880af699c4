"""Tree attention on SGLang's CPU backend: its result, and that keys are read once per KV head."""

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

    def __init__(self, slots: int) -> None:
        self.keys, self.values = torch.randn(2, slots, KV_HEADS, SIZE)

    def set_kv_buffer(
        self, layer: Any, where: Any, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self.keys[where.loc], self.values[where.loc] = keys, values

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("window", [-1, 0, 3, 6, 9])
def test_heads_of_a_group_share_one_reading_of_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, group: int, nodes: int, window: int
) -> None:
    from drafttree.sglang.attention import TreeAttentionBackend

    torch.manual_seed(0)
    requests, heads = 2, KV_HEADS * group
    table = torch.randperm(requests * (CONTEXT + nodes)).view(requests, -1)
    pool = Pool(table.numel())
    parents = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 3]])[:, :nodes].int()
    masks = tree_mask(parents, torch.full((requests,), nodes).int())
    depth = masks.sum(2) - 1
    earliest = max(CONTEXT - window, 0) if window >= 0 else 0
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(custom_mask=masks),
        seq_lens=torch.full((requests,), CONTEXT),
        req_pool_indices=torch.arange(requests),
        out_cache_loc=table[:, CONTEXT:].flatten(),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=SIZE,
        v_head_dim=SIZE,
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
    shapes = []
    product = F.scaled_dot_product_attention

    def counted(*given: torch.Tensor, **options: Any) -> torch.Tensor:
        shapes.append(tuple(given[1].shape))
        return product(*given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    rows = requests * nodes
    q, k, v = torch.randn(rows, heads * SIZE), *torch.randn(2, rows, KV_HEADS, SIZE)
    backend.init_forward_metadata(batch)
    output = backend.forward_extend(q, k, v, layer, batch).view(requests, nodes, heads, SIZE)
    assert shapes == [(1, KV_HEADS, CONTEXT - earliest + nodes, SIZE)] * requests

    for request, slots in enumerate(table):
        seen = F.pad(masks[request], (CONTEXT, 0), value=True)
        positions = torch.cat([torch.arange(CONTEXT), CONTEXT + depth[request]])
        if window >= 0:
            seen &= CONTEXT + depth[request][:, None] - positions <= window
        for head in range(heads):
            query = q.view(requests, nodes, heads, SIZE)[request, :, head]
            scores = 0.25 * query @ pool.keys[slots, head // group].T
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            expected = weights @ pool.values[slots, head // group]
            torch.testing.assert_close(output[request, :, head], expected)
