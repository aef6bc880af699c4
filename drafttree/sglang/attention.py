"""Tree attention on SGLang's CPU backend.

Nodes of a draft tree attend to the context, their ancestors and themselves. SGLang's backend has no
branch for verification, so verification is computed here and everything else by SGLang's backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


@dataclass(frozen=True)
class VerifyMasks:
    """Attention masks of one verification, the same for every layer of a kind.

    Attributes:
        lengths: Length of each request's context.
        slots: KV slots of each request's context and then of its nodes, `int64 [length]` each.
        masks: `bool [B, R, N]`, ancestor masks of the last R of N nodes, padding included.
        dtype: Data type of the biases.
    """

    lengths: list[int]
    slots: list[torch.Tensor]
    masks: torch.Tensor
    dtype: torch.dtype
    _made: dict[tuple[int, int | None], list[tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict
    )

    def visible(self, group: int, window: int | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the rows of each request may attend to.

        Args:
            group: Number of query heads for which a row is repeated, one head after another.
            window: Number of tokens before its own that a row attends to; None for all.

        Returns:
            For each request KV slots, `int64 [n]`, and biases of the scores, 0 or -inf,
            `[group * R, n]`.
        """
        key = group, window
        if key not in self._made:
            requests = zip(self.lengths, self.slots, self.masks, strict=True)
            self._made[key] = [self._of_request(*each, group, window) for each in requests]
        return self._made[key]

    def _of_request(
        self, length: int, slots: torch.Tensor, mask: torch.Tensor, group: int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = 0 if window is None else max(length - window, 0)
        bias = torch.zeros(len(mask), len(slots) - first, dtype=self.dtype)
        nodes = mask
        if window is not None:
            # Nodes come after their ancestors, so those that a row sees are in order of depth.
            seen = mask.sum(1, keepdim=True)
            nodes = mask & (seen - mask.cumsum(1) <= window)
            positions = length + seen - 1
            outside = torch.arange(first, length) < positions - window
            bias[:, : length - first].masked_fill_(outside, -torch.inf)
        bias[:, length - first :].masked_fill_(~nodes, -torch.inf)
        return slots[first:], bias.repeat(group, 1)


class TreeAttentionBackend(TorchNativeAttnBackend):
    """SGLang's backend with masked attention for the rows of draft trees."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._dtype: torch.dtype = runner.dtype
        self._verify: VerifyMasks | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare for one forward.

        In verification `spec_info.custom_mask` is `bool [B, R, N]`: ancestor masks of the last R of
        N nodes.
        """
        super().init_forward_metadata(forward_batch)
        self._verify = None
        if not forward_batch.forward_mode.is_target_verify():
            return
        masks = forward_batch.spec_info.custom_mask
        lengths = forward_batch.seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        rows = zip(forward_batch.req_pool_indices.tolist(), lengths, strict=True)
        slots = [table[row, : length + masks.shape[2]].long() for row, length in rows]
        self._verify = VerifyMasks(lengths, slots, masks, self._dtype)

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
        verify = self._verify
        if verify is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        per_request, heads, size = verify.masks.shape[1], layer.tp_k_head_num, layer.qk_head_dim
        group = layer.tp_q_head_num // heads
        # The query heads of a group become rows of their KV head, so that its keys and values are
        # read once and not once for each of them.
        queries = q.view(-1, per_request, heads, group, size).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(-1, heads, group * per_request, size)
        output = q.new_empty(len(q), layer.tp_q_head_num * layer.v_head_dim)
        rows = output.view(-1, per_request, heads, group, layer.v_head_dim).permute(0, 2, 3, 1, 4)
        window = layer.sliding_window_size
        visible = verify.visible(group, None if window in (None, -1) else window)
        for query, out, (slots, bias) in zip(queries, rows, visible, strict=True):
            # The batch dimension selects the fused kernel. `index_select` copies whole rows.
            attended = F.scaled_dot_product_attention(
                query[None],
                keys.index_select(0, slots).to(q.dtype).transpose(0, 1)[None],
                values.index_select(0, slots).to(q.dtype).transpose(0, 1)[None],
                bias,
                scale=layer.scaling,
            )
            out.copy_(attended[0].reshape(heads, group, per_request, -1))
        return output
