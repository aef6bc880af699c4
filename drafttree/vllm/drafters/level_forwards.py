"""Forwards of a draft model within a step, in which each of the step's rows is read once.

The draft model reads the prompts and the roots first, and then one level of the trees after
another. The host, which has scheduled the rows, knows how many there are in each part; where they
are is computed on the device, and nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from tree_kernels.mask import tree_mask

from drafttree.arrays import IntArray, LongArray
from drafttree.tree import DraftTree
from drafttree.vllm.drafters.draft_graphs import DraftGraphs
from drafttree.vllm.drafters.step_parts import StepParts
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
        model: Runs the draft model.
        parts: The parts of the step, for the draft model's layers.
        rows: The step's rows.
    """

    def __init__(self, model: DraftGraphs, parts: StepParts, rows: StepRows) -> None:
        self._model = model
        self._parts = parts
        self._rows = rows
        self._requests = torch.arange(len(rows.sizes), device=rows.sizes.device)
        self._before_roots = rows.root_positions.int()

    def read_undrafted(self) -> None:
        """Read all rows of a step without drafts."""
        self._model.forward(self._rows.input_ids, self._rows.positions)

    def read_roots(self) -> torch.Tensor:
        """Read all rows that are not draft tokens, and return the roots' states, `[B, d]`."""
        rows = self._rows
        lengths = self._before_roots + 1
        counts = np.diff(rows.starts_on_host) - (rows.sizes_on_host - 1)
        total = int(counts.sum())
        if total == len(counts):  # no request has a prompt to read
            places = rows.places[:, 0]
            return self._forward(rows.input_ids[places], places, self._starts(1), lengths, 1)
        drafts = pad((rows.sizes - 1).cumsum(0, dtype=torch.int32), (1, 0))
        starts = rows.starts - drafts
        request = self._request_of_row(starts, total)
        places = torch.arange(total, device=starts.device) + drafts[request]
        most = int(counts.max())
        hidden = self._forward(rows.input_ids[places], places, starts, lengths, most)
        return hidden[starts[1:] - 1]

    def read_level(self, first: int, trees: DraftTree) -> torch.Tensor:
        """Write draft tokens into the step and read them; their ancestors have been read.

        Args:
            first: Their first column.
            trees: The trees up to and with their last column. Where there is no node, the token 0
                is read.

        Returns:
            The states of the columns from `first` on, `[B, last - first, d]`; those of columns that
            a request does not have are arbitrary.
        """
        rows, requests = self._rows, self._requests
        last = trees.tokens.shape[1]
        width = last - first
        sizes, firsts = rows.sizes.clamp(max=last), rows.sizes.clamp(max=first)
        total = int((np.minimum(rows.sizes_on_host, last) - first).clip(min=0).sum())
        is_whole = total == len(requests) * width
        tokens = trees.tokens[:, first:].clamp(min=0)
        if is_whole:
            starts = self._starts(width)
            places, tokens = rows.places[:, first:last].flatten(), tokens.flatten()
        else:
            starts = pad((sizes - firsts).cumsum(0, dtype=torch.int32), (1, 0))
            request = self._request_of_row(starts, total)
            column = torch.arange(total, device=starts.device) - starts[request]
            places, tokens = rows.places[request, first + column], tokens[request, column]
        tokens = tokens.to(rows.input_ids.dtype)
        self._write(tokens, places)
        masks = StepMasks(
            requests=requests,
            tree_sizes=sizes,
            masks=tree_mask(trees.parents.contiguous(), sizes),
            first_nodes=firsts,
        )
        hidden = self._forward(tokens, places, starts, self._before_roots + sizes, width, masks)
        if is_whole:
            return hidden.view(len(requests), width, -1)
        columns = torch.arange(width, device=starts.device)
        return hidden[(starts[:-1, None] + columns).clamp(max=total - 1)]

    def _write(self, tokens: torch.Tensor, places: torch.Tensor) -> None:
        """Replace placeholders by draft tokens, for the target."""
        self._rows.input_ids[places] = tokens

    def _starts(self, width: int) -> torch.Tensor:
        """First row of each request, and the number of rows, where all have `width` rows."""
        requests = len(self._requests)
        return torch.arange(
            0, (requests + 1) * width, width, dtype=torch.int32, device=self._requests.device
        )

    def _request_of_row(self, starts: torch.Tensor, total: int) -> torch.Tensor:
        counts = (starts[1:] - starts[:-1]).long()
        return torch.repeat_interleave(self._requests, counts, output_size=total)

    def _forward(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        most: int,
        masks: StepMasks | None = None,
    ) -> torch.Tensor:
        """Run the model over some rows and their tokens, see `StepParts.reading`; `[P, d]`."""
        with self._parts.reading(places, starts, lengths, most, masks):
            return self._model.forward(tokens, self._rows.positions[places])


def with_columns(probs: torch.Tensor, columns: int) -> torch.Tensor:
    """Distributions `[B, n, V]`, with zeros in further columns up to `columns`."""
    missing = columns - probs.shape[1]
    return pad(probs, (0, 0, 0, missing)) if missing else probs
