"""Attention of a drafter's layers over rows of texts that are not those of the step, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from drafttree.arrays import LongArray


class TextRows:
    """Finds and reads the KV of tokens of the batch's texts, for the layers of a drafter.

    Args:
        runner: The model runner, whose KV caches exist.
        prefix: What the names of the layers begin with. They share one group of KV caches.

    Attributes:
        num_slots: Number of KV slots.
    """

    def __init__(self, runner: Any, prefix: str) -> None:
        self._runner = runner
        self._prefix = prefix
        groups = runner.attn_groups
        self._group = next(index for index, each in enumerate(groups) if self._layers(each))
        assert not any(self._layers(each) for each in groups[self._group + 1 :])
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

    @contextmanager
    def reading(self, requests: LongArray, starts: LongArray, ends: LongArray) -> Iterator[None]:
        """The forward context of tokens of some requests, each a part of its text.

        Args:
            requests: The requests' rows in the batch, `int64 [T]`.
            starts: First position of each, `int64 [T]`.
            ends: The position after the last of each, `int64 [T]`.
        """
        counts = ends - starts
        bounds = torch.from_numpy(np.append(0, counts.cumsum()).astype(np.int32))
        slots = [self.slots(*each) for each in zip(requests, starts, ends, strict=True)]
        table = self._table.get_device_tensor(self._runner.input_batch.num_reqs)
        common = CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            num_reqs=len(requests),
            num_actual_tokens=int(counts.sum()),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table[torch.from_numpy(requests)],
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
        )
        metadata, mapping = {}, {}
        for group in self._runner.attn_groups[self._group]:
            names = self._layers([group])
            if not names:
                continue
            metadata.update(
                dict.fromkeys(names, group.get_metadata_builder(0).build_part(common, None))
            )
            mapping.update(dict.fromkeys(names, common.slot_mapping))
        with set_forward_context(
            metadata,
            self._runner.vllm_config,
            num_tokens=common.num_actual_tokens,
            slot_mapping=mapping,
        ):
            yield

    @property
    def _table(self) -> Any:
        return self._runner.input_batch.block_table.block_tables[self._group]

    def _layers(self, groups: Any) -> list[str]:
        return [
            name for group in groups for name in group.layer_names if name.startswith(self._prefix)
        ]
