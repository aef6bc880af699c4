"""KV of one more layer in the slots of SGLang's pool, its memory, and the prefixes it is true for.

The layer keeps at each position what the token after it says too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from drafttree.sglang.versions import unknown


class LayerCache:
    """The layer's keys and values, `[slots, heads, size]` each, in the target's slots."""

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
        """Write some rows of each request, and attend from them causally.

        Args:
            q, k, v: `[N, heads, size]`, request by request.
            counts: of each request's rows; they are its last.
            slots: of all of each request's tokens, these rows included.
        """
        here = torch.cat([own[-count:] for own, count in zip(slots, counts, strict=True)])
        self._keys[here], self._values[here] = k, v
        output = torch.empty_like(q)
        first = 0
        for count, own in zip(counts, slots, strict=True):
            rows = slice(first, first + count)
            mask = torch.ones(count, len(own), dtype=torch.bool).tril(len(own) - count)
            # With a dimension for the batch: without one, all scores would be written out.
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


def count_layer_memory() -> None:
    """Have the host count one layer more when it sizes its KV pool. Called before it does.

    Raises:
        RuntimeError: this is not the SGLang that we know.
    """
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    original = getattr(DefaultPoolConfigurator, "_compute_cell_size", None)
    if original is None:
        raise unknown("DefaultPoolConfigurator has no _compute_cell_size")

    @functools.wraps(original)
    def _compute_cell_size(self: Any, kvc: Any, num_layers: int) -> int:
        return int(original(self, kvc, num_layers + 1))

    DefaultPoolConfigurator._compute_cell_size = _compute_cell_size


def match_prefixes_by_pairs() -> None:
    """Have the host's radix cache match pairs of neighbouring tokens, as for its own EAGLE.

    So a hit ends where the token after it is the same too. Called before the cache is made.

    Raises:
        RuntimeError: this is not the SGLang that we know.
    """
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    original = getattr(kv_cache_builder, "create_tree_cache", None)
    if original is None or "is_eagle" not in CacheInitParams.__dataclass_fields__:
        raise unknown("its radix cache does not match pairs of tokens")

    def create_tree_cache(context: Any) -> Any:
        context.params.is_eagle = True
        return original(context)

    kv_cache_builder.create_tree_cache = create_tree_cache
