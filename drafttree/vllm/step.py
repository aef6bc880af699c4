"""The draft trees of one engine step: which of the batch's rows belong to which node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tree_kernels.mask import tree_mask

from drafttree.drafter import DraftTree
from drafttree.transfer import on_device

IntArray = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class StoredTree:
    """A request's tree from when it was drafted to when it is verified, root included.

    Attributes:
        parents: `int32 [n]`, breadth-first, -1 for the root.
        depths: `int32 [n]`.
    """

    parents: IntArray
    depths: IntArray


NO_TOKEN = -1

ROOT_ONLY = StoredTree(np.full(1, -1, np.int32), np.zeros(1, np.int32))


@dataclass(frozen=True)
class StepMasks:
    """The trees of a step.

    Attributes:
        requests: `int64 [T]`, their rows in the batch; on the host.
        nodes: `int64 [T]`, root included; they are the request's last tokens. On the host.
        masks: `bool [T, N, N]`: node i sees node j. On the device.
    """

    requests: torch.Tensor
    nodes: torch.Tensor
    masks: torch.Tensor


@dataclass(frozen=True)
class StepTrees:
    """The trees that the engine scheduled for one step, as far as it scheduled them.

    `R` rows have logits: for every request its root's and then its nodes'. The root is the last
    accepted token, or the last token of a prefill chunk.

    Attributes:
        rows: `[R]`, each such row's place in the batch of tokens.
        starts: `int64 [B]`, each request's root among the R rows.
        sizes: `int64 [B]`, each request's nodes, root included.
        requests: `int64 [R]`, whose each row is.
        decoding: `bool [B]`: the step reads nothing of the request but these nodes.
        parents: `int32 [B, N]`, padded with -1.
        position_offsets: `int64 [tokens]`, what to add to positions counted along a chain.
        max_depth: the greatest depth of a node.
    """

    rows: torch.Tensor
    starts: np.ndarray[Any, np.dtype[np.int64]]
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    requests: np.ndarray[Any, np.dtype[np.int64]]
    decoding: np.ndarray[Any, np.dtype[np.bool_]]
    parents: IntArray
    position_offsets: np.ndarray[Any, np.dtype[np.int64]]
    max_depth: int

    @classmethod
    def of_batch(
        cls,
        request_ids: Sequence[str],
        scheduled: Mapping[str, Sequence[int]],
        stored: Mapping[str, StoredTree],
        num_scheduled_tokens: np.ndarray[Any, Any],
        rows: torch.Tensor,
    ) -> StepTrees:
        """Cut the stored trees to what was scheduled of them: prefixes, so still trees."""
        sizes = np.array([1 + len(scheduled.get(name, ())) for name in request_ids])
        parents = np.full((len(sizes), sizes.max()), -1, np.int32)
        offsets = np.zeros(int(num_scheduled_tokens.sum()), np.int64)
        ends = np.cumsum(num_scheduled_tokens)
        max_depth = 0
        for row, (name, size) in enumerate(zip(request_ids, sizes, strict=True)):
            tree = stored[name] if size > 1 else ROOT_ONLY
            parents[row, :size] = tree.parents[:size]
            if size > 1:
                offsets[ends[row] - size : ends[row]] = tree.depths[:size] - np.arange(size)
            max_depth = max(max_depth, int(tree.depths[size - 1]))
        return cls(
            rows=rows,
            starts=np.cumsum(sizes) - sizes,
            sizes=sizes,
            requests=np.repeat(np.arange(len(sizes)), sizes),
            decoding=num_scheduled_tokens == sizes,
            parents=parents,
            position_offsets=offsets,
            max_depth=max_depth,
        )

    @property
    def drafted(self) -> bool:
        """Whether any request has a draft in this step."""
        return self.parents.shape[1] > 1

    def by_node(self, values: torch.Tensor) -> torch.Tensor:
        """What is known of the R rows, for the nodes: `[B, N]`; padding repeats the last one."""
        if not self.drafted:
            return values[:, None]
        return values[self._row_of_node]

    @cached_property
    def _row_of_node(self) -> torch.Tensor:
        nodes = np.minimum(np.arange(self.parents.shape[1]), self.sizes[:, None] - 1)
        return on_device(self.starts[:, None] + nodes, self.rows.device)

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """What is known of the nodes, `int32 [B, N]`, for the R rows."""
        if not self.drafted:
            return values[:, 0]
        nodes = np.arange(len(self.requests)) - self.starts[self.requests]
        return values.flatten()[
            on_device(self.requests * values.shape[1] + nodes, self.rows.device)
        ]

    def trees(self, tokens: torch.Tensor) -> DraftTree:
        """The batch's trees, given the R rows' input tokens (`int32 [R]`)."""
        if not self.drafted:
            return DraftTree.of_roots(tokens.to(torch.int32))
        device = self.rows.device
        padding = np.arange(self.parents.shape[1]) >= self.sizes[:, None]
        rows = self.by_node(tokens).to(torch.int32)
        return DraftTree(
            tokens=rows.masked_fill(on_device(padding, device), NO_TOKEN),
            parents=on_device(self.parents, device),
            num_nodes=on_device(self.sizes.astype(np.int32), device),
        )

    def masks(self) -> StepMasks:
        """Who sees whom in the trees that have more than a root."""
        requests = np.flatnonzero(self.sizes > 1)
        nodes = self.sizes[requests]
        device = self.rows.device
        masks = tree_mask(
            on_device(self.parents[requests], device), on_device(nodes.astype(np.int32), device)
        )
        return StepMasks(torch.from_numpy(requests), torch.from_numpy(nodes), masks)
