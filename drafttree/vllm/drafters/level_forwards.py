"""Forwards of a draft model within a step, in which each of the step's rows is read once.

The draft model reads the prompts and the roots first, and then one level of the trees after
another. The host, which has scheduled the rows, knows how many there are in each part; where they
are is computed on the device, and nothing waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from tree_kernels.mask import tree_mask

from drafttree.arrays import IntArray, LongArray
from drafttree.vllm.drafters.step_parts import StepParts, without_graphs
from drafttree.vllm.step_masks import StepMasks


class StepRows(NamedTuple):
    """The rows of one step of B requests, T tokens in all.

    Attributes:
        input_ids: Input tokens, `int [T]` or more; draft tokens are written into them.
        positions: Positions of these tokens.
        starts: First row of each request, and T, `int32 [B + 1]`.
        starts_on_host: The same on the host.
        sizes: Number of columns of each request's tree, the root's counted, `int32 [B]`.
        sizes_on_host: The same on the host.
        places: Row of each column, `int64 [B, N]`; padding repeats a request's last.
        root_positions: Number of tokens before each root, `int64 [B]`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    starts_on_host: IntArray
    sizes: torch.Tensor
    sizes_on_host: LongArray
    places: torch.Tensor
    root_positions: torch.Tensor


class LevelForwards:
    """The forwards of a draft model in one step.

    Args:
        model: The draft model.
        parts: The parts of the step, for the draft model's layers.
        rows: The step's rows.
    """

    def __init__(self, model: Any, parts: StepParts, rows: StepRows) -> None:
        self._model = model
        self._parts = parts
        self._rows = rows
        self._requests = torch.arange(len(rows.sizes), device=rows.sizes.device)

    def read_undrafted(self) -> None:
        """Read all rows of a step without drafts."""
        with without_graphs():
            self._model(input_ids=self._rows.input_ids, positions=self._rows.positions)

    def read_roots(self) -> torch.Tensor:
        """Read all rows that are not draft tokens, and return the roots' states, `[B, d]`."""
        rows = self._rows
        drafts = pad((rows.sizes - 1).cumsum(0, dtype=torch.int32), (1, 0))
        starts = rows.starts - drafts
        counts = np.diff(rows.starts_on_host) - (rows.sizes_on_host - 1)
        total = int(counts.sum())
        request = self._request_of_row(starts, total)
        places = torch.arange(total, device=starts.device) + drafts[request]
        hidden = self._forward(places, starts, rows.root_positions + 1, int(counts.max()))
        return hidden[starts[1:] - 1]

    def read_level(self, first: int, parents: torch.Tensor) -> torch.Tensor:
        """Read draft tokens whose ancestors have been read.

        Args:
            first: Their first column.
            parents: Parents of the columns up to and with theirs, `int32 [B, last]`.

        Returns:
            The states of the columns from `first` on, `[B, last - first, d]`; those of columns that
            a request does not have are arbitrary.
        """
        rows, requests = self._rows, self._requests
        last = parents.shape[1]
        width = last - first
        sizes = rows.sizes.clamp(max=last)
        counts = (sizes - first).clamp(min=0)
        total = int((np.minimum(rows.sizes_on_host, last) - first).clip(min=0).sum())
        starts = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        is_whole = total == len(requests) * width
        if is_whole:
            places = rows.places[:, first:last].flatten()
        else:
            request = self._request_of_row(starts, total)
            column = torch.arange(first, first + total, device=starts.device) - starts[request]
            places = rows.places[request, column]
        masks = StepMasks(
            requests=requests,
            tree_sizes=sizes,
            masks=tree_mask(parents.contiguous(), sizes),
            first_nodes=(sizes - counts).long(),
        )
        hidden = self._forward(places, starts, rows.root_positions + sizes, width, masks)
        if is_whole:
            return hidden.view(len(requests), width, -1)
        columns = torch.arange(width, device=starts.device)
        return hidden[(starts[:-1, None] + columns).clamp(max=total - 1)]

    def _request_of_row(self, starts: torch.Tensor, total: int) -> torch.Tensor:
        counts = (starts[1:] - starts[:-1]).long()
        return torch.repeat_interleave(self._requests, counts, output_size=total)

    def _forward(
        self,
        places: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        most: int,
        masks: StepMasks | None = None,
    ) -> torch.Tensor:
        """Run the model over some rows, see `StepParts.reading`; `[P, d]`."""
        rows = self._rows
        with self._parts.reading(places, starts, lengths, most, masks):
            hidden: torch.Tensor = self._model(
                input_ids=rows.input_ids[places], positions=rows.positions[places]
            )
        return hidden
