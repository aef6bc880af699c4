"""KV in the slots of SGLang's KV pool: KV compaction, and the cache of a drafter's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn import functional as F
from tree_kernels.kv_move import movers_of

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""`(slots int64 [B, N], path int32 [B, D])`: move KV rows as a `KvMover` does."""


def kv_movers(cache: Any) -> list[Move]:
    """Make the movers for the rows of SGLang's KV cache.

    Raises:
        RuntimeError: This kind of cache is not supported.
    """
    if type(cache) is SWAKVPool:

        def in_windows(move: Move) -> Move:
            # Layers with a sliding window have a pool of their own, of other slots.
            return lambda slots, path: move(cache.translate_loc_from_full_to_swa(slots), path)

        return [*_movers(cache.full_kv_pool), *map(in_windows, _movers(cache.swa_kv_pool))]
    return _movers(cache)


def _movers(cache: Any) -> list[Move]:
    # Subclasses keep something else in these buffers, such as scales, or find rows by other ids.
    if type(cache) is not MHATokenToKVPool:
        raise RuntimeError(
            f"draft trees do not work with this model's KV cache in SGLang, a "
            f"{type(cache).__name__}: leave --speculative-algorithm out"
        )
    # The movers take each slot as a block of one row.
    return [*movers_of(layer.unsqueeze(2) for layer in (*cache.k_buffer, *cache.v_buffer))]


class LayerCache:
    """Keys and values of a drafter's layer, `[slots, heads, size]`, by the target's KV slots."""

    def __init__(self, slots: int, heads: int, size: int, dtype: torch.dtype) -> None:
        self._keys = torch.zeros(slots, heads, size, dtype=dtype)
        self._values = torch.zeros_like(self._keys)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        counts: list[int],
        slots: list[torch.Tensor],
    ) -> torch.Tensor:
        """Write the KV of each request's last rows, and compute their causal attention.

        Args:
            q: Queries `[N, heads, size]`, request by request.
            k: Keys `[N, KV heads, size]`.
            v: Values `[N, KV heads, size]`.
            counts: Number of rows of each request.
            slots: KV slots of all tokens of each request, these rows included.
        """
        here = torch.cat([own[-count:] for own, count in zip(slots, counts, strict=True)])
        self._keys[here], self._values[here] = k, v
        output = torch.empty_like(q)
        first = 0
        for count, own in zip(counts, slots, strict=True):
            rows = slice(first, first + count)
            mask = torch.ones(count, len(own), dtype=torch.bool).tril(len(own) - count)
            # The batch dimension selects the fused kernel, which does not materialise the scores.
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                self._keys[own].transpose(0, 1)[None],
                self._values[own].transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )
            output[rows] = attended[0].transpose(0, 1)
            first += count
        return output
