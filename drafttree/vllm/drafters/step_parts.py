"""Forwards of a drafter's own layers over some of a step's rows, or over tokens before them.

The engine's forward context is that of all rows of a step. Layers that are read for a few of them
get metadata of these alone, made from tensors on the device, whose shapes the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import (
    BatchDescriptor,
    get_forward_context,
    override_forward_context,
)
from vllm.v1.attention.backend import CommonAttentionMetadata

from drafttree.arrays import LongArray
from drafttree.transfer import all_on_device
from drafttree.vllm.step_masks import StepMasks


class StepCache(NamedTuple):
    """A step's part of a group of KV caches.

    Attributes:
        blocks: Blocks of the step's B requests, `int32 [B, P]`.
        slots: Slots of the step's rows, `int64 [T]`.
        block_size: Slots of a block.
    """

    blocks: torch.Tensor
    slots: torch.Tensor
    block_size: int

    def at(
        self, requests: torch.Tensor, of_rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks `[R, P]` of some requests, and the slots `int64 [N]` of rows of theirs.

        Args:
            requests: The requests' places in the step, `int64 [R]`.
            of_rows: Which of them each row is of, `int64 [N]`.
            positions: Positions of the rows, `int64 [N]`.
        """
        blocks, size = self.blocks[requests], self.block_size
        return blocks, blocks[of_rows, positions // size].long() * size + positions % size


@contextmanager
def other_model(graphs: BatchDescriptor | None = None, **changes: Any) -> Iterator[None]:
    """The engine's forward context, in which another model than the target can run.

    Args:
        graphs: Which of the model's piecewise graphs are captured or replayed; None for none.
        **changes: Further fields of the context, and what they are.
    """
    context = get_forward_context()
    if hasattr(context, "is_padding"):
        changes["is_padding"] = None  # it would be that of the target's rows
    if graphs is None:
        changes["cudagraph_runtime_mode"] = CUDAGraphMode.NONE
    else:
        changes["cudagraph_runtime_mode"] = CUDAGraphMode.PIECEWISE
        changes["batch_descriptor"] = graphs
    with override_forward_context(replace(context, **changes)):
        yield


class StepParts:
    """The parts of one step, for some of the engine's layers.

    Args:
        runner: The model runner, whose step is prepared.
        prefix: What the names of the layers begin with.
        caches: The step's part of each group of KV caches.
    """

    def __init__(self, runner: Any, prefix: str, caches: Sequence[StepCache]) -> None:
        self._longest: int = runner.max_model_len
        self._layers = [
            (group.get_metadata_builder(0), names, cache)
            for groups, cache in zip(runner.attn_groups, caches, strict=True)
            for group in groups
            if (names := [name for name in group.layer_names if name.startswith(prefix)])
        ]

    @property
    def cache(self) -> StepCache:
        """The step's part of the layers' KV caches, which are in one group."""
        ((_, _, cache),) = self._layers
        return cache

    @contextmanager
    def reading(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        most: int,
        masks: StepMasks | None = None,
    ) -> Iterator[None]:
        """The forward context of some rows, in which the layers can run.

        Args:
            rows: Places of these rows in the step, those of one request after another, `int [P]`.
            starts: First of the rows of each request, and their number, `int32 [B + 1]`.
            lengths: Number of tokens of each request up to the last of its rows, `int [B]`.
            most: Greatest number of rows of a request.
            masks: Masks of the rows' trees; None if they are causal.
        """

        def of(cache: StepCache) -> tuple[torch.Tensor, torch.Tensor]:
            return cache.blocks, cache.slots[rows]

        with self._context(len(rows), starts, lengths, most, masks, of):
            yield

    @contextmanager
    def reading_before(
        self, requests: LongArray, counts: LongArray, positions: torch.Tensor
    ) -> Iterator[None]:
        """The forward context of tokens before the step's: of a part of some requests' texts.

        Args:
            requests: Places of these requests in the step, `int64 [R]`, on the host.
            counts: Number of tokens of each, `int64 [R]`, on the host.
            positions: The tokens' positions, ascending, of one request after another, `int64 [P]`.
        """
        bounds = np.append(0, counts.cumsum())
        places, of_rows, starts, last = all_on_device(
            [
                *(requests, np.repeat(np.arange(len(counts)), counts)),
                *(bounds.astype(np.int32), bounds[1:] - 1),
            ],
            positions.device,
        )

        def of(cache: StepCache) -> tuple[torch.Tensor, torch.Tensor]:
            return cache.at(places, of_rows, positions)

        lengths, most = positions[last] + 1, int(counts.max())
        with self._context(len(positions), starts, lengths, most, None, of):
            yield

    @contextmanager
    def reading_at(
        self,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        rows: int,
        most: int,
    ) -> Iterator[None]:
        """The forward context of causal rows that need not be the step's.

        The KV of more rows may be written than attend.

        Args:
            slots: KV slots of the rows whose KV is written, `int64 [P]`; -1 where nothing is.
            blocks: Blocks of the requests, `int32 [B, n]`.
            starts: First of the rows of each request that attend, and the number of those that
                belong to requests, `int32 [B + 1]`.
            lengths: Number of tokens of each request up to the last of its rows, `int [B]`.
            rows: Number of rows that attend.
            most: Greatest number of them of a request.
        """
        with self._context(rows, starts, lengths, most, None, lambda _: (blocks, slots)):
            yield

    @contextmanager
    def _context(
        self,
        count: int,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        most: int,
        masks: StepMasks | None,
        of: Callable[[StepCache], tuple[torch.Tensor, torch.Tensor]],
    ) -> Iterator[None]:
        """The forward context of `count` rows; `of` tells their blocks and slots in a cache."""
        lengths = lengths.int()
        metadata, slot_mapping = {}, {}
        for builder, names, cache in self._layers:
            blocks, slots = of(cache)
            here = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,  # read on a CPU alone
                seq_lens=lengths,
                num_reqs=len(lengths),
                num_actual_tokens=count,
                max_query_len=most,
                max_seq_len=self._longest,
                block_table_tensor=blocks,
                slot_mapping=slots,
            )
            metadata.update(dict.fromkeys(names, builder.build_part(here, masks)))
            slot_mapping.update(dict.fromkeys(names, slots))
        with other_model(attn_metadata=metadata, slot_mapping=slot_mapping):
            yield
