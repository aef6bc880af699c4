"""KV compaction in the slots of SGLang's KV pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
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
