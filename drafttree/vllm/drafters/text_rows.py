"""KV slots of tokens of the batch's texts, for the layers of a drafter, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from drafttree.arrays import LongArray


class TextRows:
    """Finds the KV slots of tokens of the batch's texts.

    Args:
        runner: The model runner, whose KV caches exist.
        prefix: What the names of the layers begin with. They share one group of KV caches.

    Attributes:
        num_slots: Number of KV slots.
    """

    def __init__(self, runner: Any, prefix: str) -> None:
        self._runner = runner
        self._group = group_of(runner, prefix)
        config = runner.kv_cache_config
        block_size = config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self.num_slots: int = config.num_blocks * block_size

    def slots_of_step(self, rows: int) -> LongArray:
        """KV slots of a step's first `rows` tokens, `int64 [rows]`."""
        slots: LongArray = self._table.slot_mapping.gpu[:rows].numpy()
        return slots

    def slots(self, request: int, start: int, end: int) -> LongArray:
        """KV slots of a request's tokens from `start` to `end`.

        Args:
            request: The request's row in the batch.
            start: First position.
            end: The position after the last.
        """
        table = self._table
        positions = np.arange(start, end, dtype=np.int64)
        blocks = table.block_table.np[request, positions // table.block_size].astype(np.int64)
        slots: LongArray = blocks * table.block_size + positions % table.block_size
        return slots

    @property
    def _table(self) -> Any:
        return self._runner.input_batch.block_table.block_tables[self._group]


def group_of(runner: Any, prefix: str) -> int:
    """The group of KV caches that has all layers whose names begin with `prefix`."""
    found = [
        index
        for index, groups in enumerate(runner.attn_groups)
        if any(name.startswith(prefix) for group in groups for name in group.layer_names)
    ]
    assert len(found) == 1, f"the layers of {prefix} are in {len(found)} groups of KV caches"
    return found[0]
