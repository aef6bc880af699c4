"""Forwards of a draft model within a step, in which each of the step's rows is read once.

The engine's forward context is that of all rows of the step. A draft model reads the prompts and
the roots first, and then one level of the trees after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tree_kernels.mask import tree_mask
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from drafttree.vllm.arrays import LongArray
from drafttree.vllm.drafters.draft_model_loader import PREFIX
from drafttree.vllm.step import StepTrees
from drafttree.vllm.step_masks import StepMasks


class LevelForwards:
    """The forwards of a draft model in one step, on a CPU.

    Args:
        runner: The model runner, whose step is prepared.
        model: The draft model.
        trees: The step's trees.
        input_ids: Input tokens of the step, into which draft tokens are written.
        positions: Positions of these tokens.
    """

    def __init__(
        self,
        runner: Any,
        model: Any,
        trees: StepTrees,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._runner = runner
        self._model = model
        self._input_ids, self._positions = input_ids, positions
        requests = len(trees.tree_sizes)
        bounds = runner.query_start_loc.np[: requests + 1].astype(np.int64)
        computed = runner.input_batch.num_computed_tokens_cpu[:requests]
        self._sizes = trees.tree_sizes
        self._starts = bounds[:-1]
        self._roots = bounds[1:] - trees.tree_sizes
        self._lengths = computed + self._roots - self._starts

    def read_roots(self) -> torch.Tensor:
        """Read all rows that are not draft tokens, and return the roots' states, `[B, d]`."""
        counts = self._roots - self._starts + 1
        requests = np.arange(len(counts))
        hidden = self._forward(requests, self._starts, counts, self._lengths + 1, None)
        return hidden[torch.from_numpy(np.cumsum(counts) - 1)]

    def read_level(self, first: int, parents: torch.Tensor) -> torch.Tensor:
        """Read draft tokens whose ancestors have been read.

        Args:
            first: Their first column.
            parents: Parents of the columns up to and with theirs, `int32 [B, last]`.

        Returns:
            The states of the columns from `first` on, `[B, last - first, d]`; those of columns that
            a request does not have are arbitrary.
        """
        sizes = np.minimum(self._sizes, parents.shape[1])
        requests = np.flatnonzero(sizes > first)
        sizes = sizes[requests]
        counts = sizes - first
        masks = StepMasks(
            requests=torch.arange(len(requests)),
            tree_sizes=torch.from_numpy(sizes),
            masks=tree_mask(
                parents[torch.from_numpy(requests)].contiguous(), torch.from_numpy(sizes).int()
            ),
            first_nodes=torch.full((len(requests),), first),
        )
        hidden = self._forward(
            requests,
            self._roots[requests] + first,
            counts,
            self._lengths[requests] + sizes,
            masks,
        )
        columns = np.minimum(np.arange(parents.shape[1] - first), counts[:, None] - 1)
        places = np.zeros((len(self._sizes), columns.shape[1]), np.int64)
        places[requests] = (np.cumsum(counts) - counts)[:, None] + columns
        return hidden[torch.from_numpy(places)]

    def _forward(
        self,
        requests: LongArray,
        starts: LongArray,
        counts: LongArray,
        lengths: LongArray,
        masks: StepMasks | None,
    ) -> torch.Tensor:
        """Run the model over some rows of some requests.

        Args:
            requests: The requests, `[T]`.
            starts: Each one's first row in the step, `[T]`.
            counts: Number of its rows, `[T]`.
            lengths: Number of its tokens up to the last of these rows, `[T]`.
            masks: Masks of the rows' trees; None if they are causal.
        """
        begins = np.cumsum(counts) - counts
        rows = torch.from_numpy(
            np.repeat(starts - begins, counts) + np.arange(counts.sum(), dtype=np.int64)
        )
        bounds = torch.from_numpy(np.append(begins, counts.sum()).astype(np.int32))
        common = CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=torch.from_numpy(lengths.astype(np.int32)),
            num_reqs=len(requests),
            num_actual_tokens=len(rows),
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=torch.empty(0),
            slot_mapping=rows,
        )
        with self._context(torch.from_numpy(requests), rows, common, masks):
            hidden: torch.Tensor = self._model(
                input_ids=self._input_ids[rows], positions=self._positions[rows]
            )
        return hidden

    @contextmanager
    def _context(
        self,
        requests: torch.Tensor,
        rows: torch.Tensor,
        common: CommonAttentionMetadata,
        masks: StepMasks | None,
    ) -> Iterator[None]:
        """The forward context of these rows, for the draft model's layers."""
        runner, metadata, slots = self._runner, {}, {}
        tables = runner.input_batch.block_table.block_tables
        for groups, table in zip(runner.attn_groups, tables, strict=True):
            here = common.replace(
                block_table_tensor=table.get_device_tensor(len(self._sizes))[requests],
                slot_mapping=table.slot_mapping.gpu[rows],
            )
            for group in groups:
                names = [name for name in group.layer_names if name.startswith(PREFIX)]
                if not names:
                    continue
                builder = group.get_metadata_builder(0)
                shown, builder.step_masks = builder.step_masks, masks
                metadata.update(dict.fromkeys(names, builder.build(0, here)))
                builder.step_masks = shown
                slots.update(dict.fromkeys(names, here.slot_mapping))
        with set_forward_context(
            metadata, runner.vllm_config, num_tokens=len(rows), slot_mapping=slots
        ):
            yield
