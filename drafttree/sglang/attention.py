"""Tree attention on SGLang's CPU backend.

Nodes of a draft tree attend to the context, their ancestors and themselves. SGLang's backend has no
branch for verification, so verification is computed here and everything else by SGLang's backend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from tree_kernels.attention_variant import AttentionVariant
from tree_kernels.cpu_attention import TreeAttention
from tree_kernels.paged_trees import PagedTrees


class TreeAttentionBackend(TorchNativeAttnBackend):
    """SGLang's backend with masked attention for the rows of draft trees."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._trees: PagedTrees | None = None
        self._layers: dict[tuple[int, int, int, int, torch.dtype], TreeAttention] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare for one forward.

        In verification `spec_info.custom_mask` is `bool [B, N, N]`, the ancestor masks of all
        nodes. The last `spec_info.draft_token_num` of them are rows of the batch.
        """
        super().init_forward_metadata(forward_batch)
        self._trees = None
        if not forward_batch.forward_mode.is_target_verify():
            return
        masks = forward_batch.spec_info.custom_mask
        requests, nodes, _ = masks.shape
        count = forward_batch.spec_info.draft_token_num
        lengths = forward_batch.seq_lens.long() + nodes
        table = self.req_to_token_pool.req_to_token
        slots = table[forward_batch.req_pool_indices, : int(lengths.max())]
        self._trees = PagedTrees(
            starts=torch.arange(requests) * count - (nodes - count),
            tree_sizes=torch.full((requests,), nodes),
            lengths=lengths,
            blocks=slots.int().contiguous(),
            masks=masks.contiguous(),
            first_nodes=None if count == nodes else torch.full((requests,), nodes - count),
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attention output, `[tokens, heads * v_head_dim]`; latent vectors are longer in keys."""
        trees = self._trees
        if trees is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if keys.dtype != q.dtype:  # of 8 bits
            used = trees.blocks.flatten()
            keys, values = (each.index_select(0, used).to(q.dtype) for each in (keys, values))
            trees = replace(trees, blocks=torch.arange(len(used)).int().view_as(trees.blocks))
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = q.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        window = layer.sliding_window_size
        # SGLang does not count the token itself.
        variant = AttentionVariant(0 if window in (None, -1) else window + 1)
        # A slot of SGLang's pool is a block of one token.
        self._attention(layer, q.dtype)(
            trees, query, keys[..., None], values[:, :, None], output, layer.scaling, variant
        )
        return output.view(len(output), -1)

    def _attention(self, layer: Any, dtype: torch.dtype) -> TreeAttention:
        """The attention of layers of a shape."""
        heads = layer.tp_q_head_num, layer.tp_k_head_num
        shape = *heads, layer.qk_head_dim, layer.v_head_dim, dtype
        if shape not in self._layers:
            self._layers[shape] = TreeAttention(
                *heads, layer.qk_head_dim, 1, dtype, layer.v_head_dim
            )
        return self._layers[shape]
