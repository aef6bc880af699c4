"""The draft trees of one engine step: which of the batch's rows belong to which node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tree_kernels.mask import tree_mask

from drafttree.drafter import DraftTree
from drafttree.transfer import all_on_device

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
    """The trees of a step, on the device.

    Attributes:
        requests: `int64 [T]`, their rows in the batch.
        nodes: `int64 [T]`, root included; they are the request's last tokens.
        masks: `bool [T, N, N]`: node i sees node j.
    """

    requests: torch.Tensor
    nodes: torch.Tensor
    masks: torch.Tensor


class SentStep(NamedTuple):
    """What the host knows of a step's trees, on the device; `T` requests have more than a root.

    Attributes:
        parents: `int32 [B, N]`.
        sizes: `int32 [B]`.
        padding: `bool [B, N]`: there is no node.
        row_of_node: `int64 [B, N]`, among the R rows; padding repeats the last one.
        cell_of_row: `int64 [R]`, the row's node in a flat `[B * N]`.
        request_of_row: `int64 [R]`.
        starts: `int64 [B]`.
        trees: `int64 [T]`, the requests with trees.
        tree_sizes: `int64 [T]`, of these.
        counted: `bool [B]`.
        position_offsets: `int64 [tokens]`.
    """

    parents: torch.Tensor
    sizes: torch.Tensor
    padding: torch.Tensor
    row_of_node: torch.Tensor
    cell_of_row: torch.Tensor
    request_of_row: torch.Tensor
    starts: torch.Tensor
    trees: torch.Tensor
    tree_sizes: torch.Tensor
    counted: torch.Tensor
    position_offsets: torch.Tensor


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
        counted: `bool [B]`: it is a decode step of the request.
        parents: `int32 [B, N]`, padded with -1.
        position_offsets: `int64 [tokens]`, what to add to positions counted along a chain.
        max_depth: the greatest depth of a node.
    """

    rows: torch.Tensor
    starts: np.ndarray[Any, np.dtype[np.int64]]
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    requests: np.ndarray[Any, np.dtype[np.int64]]
    counted: np.ndarray[Any, np.dtype[np.bool_]]
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
        answering: np.ndarray[Any, np.dtype[np.bool_]],
        rows: torch.Tensor,
    ) -> StepTrees:
        """Cut the stored trees to what was scheduled of them: prefixes, so still trees.

        Args:
            answering: `bool [B]`: the request has an answer already and goes on with it.
        """
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
            # A step may read more of a request than its tree, though it was answering: one that
            # was preempted reads its answer again.
            counted=answering & (num_scheduled_tokens == sizes),
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
        return values[self.sent.row_of_node]

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """What is known of the nodes, `int32 [B, N]`, for the R rows."""
        return values.flatten()[self.sent.cell_of_row] if self.drafted else values[:, 0]

    def trees(self, tokens: torch.Tensor) -> DraftTree:
        """The batch's trees, given the R rows' input tokens (`int32 [R]`)."""
        if not self.drafted:
            return DraftTree.of_roots(tokens.to(torch.int32))
        rows = self.by_node(tokens).to(torch.int32)
        sent = self.sent
        return DraftTree(rows.masked_fill(sent.padding, NO_TOKEN), sent.parents, sent.sizes)

    def masks(self) -> StepMasks:
        """Who sees whom in the trees that have more than a root."""
        sent = self.sent
        parents, sizes = sent.parents, sent.sizes
        if len(sent.trees) < len(sizes):
            parents, sizes = parents[sent.trees], sizes[sent.trees]
        return StepMasks(sent.trees, sent.tree_sizes, tree_mask(parents, sizes))

    @cached_property
    def sent(self) -> SentStep:
        """Sent to the device once a step, in one piece."""
        sizes, width = self.sizes, self.parents.shape[1]
        nodes = np.arange(width)
        trees = np.flatnonzero(sizes > 1)
        node_of_row = np.arange(len(self.requests)) - self.starts[self.requests]
        arrays = {
            "parents": self.parents,
            "sizes": sizes.astype(np.int32),
            "padding": nodes >= sizes[:, None],
            "row_of_node": self.starts[:, None] + np.minimum(nodes, sizes[:, None] - 1),
            "cell_of_row": self.requests * width + node_of_row,
            "request_of_row": self.requests,
            "starts": self.starts,
            "trees": trees,
            "tree_sizes": sizes[trees],
            "counted": self.counted,
            "position_offsets": self.position_offsets,
        }
        sent = all_on_device([*arrays.values()], self.rows.device)
        return SentStep(**dict(zip(arrays, sent, strict=True)))
