"""The draft trees of one engine step: which rows of the batch belong to which node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tree_kernels.mask import tree_mask

from drafttree.arrays import BoolArray, IntArray, LongArray
from drafttree.proposed import as_proposed
from drafttree.transfer import all_on_device, on_device
from drafttree.tree import NO_TOKEN, DraftTree, Verified
from drafttree.vllm.step_logits import GrammarMasks
from drafttree.vllm.step_masks import StepMasks
from drafttree.vllm.stored_tree import ROOT_ONLY, StoredTree


class StepTensors(NamedTuple):
    """Device copies of a step's tree layout; T of the B requests have drafts.

    Attributes:
        parents: Column of each node's parent, `int32 [B, N]`, padded with -1.
        tree_size: Number of nodes of each tree, the root counted, `int32 [B]`.
        padding: Whether a column contains no node, `bool [B, N]`.
        row_of_node: Logits row of each node, `int64 [B, N]`; padding repeats the last one.
        cell_of_row: Index of each row's node in a flattened `[B, N]`, `int64 [R]`.
        request_of_row: Request of each row, `int64 [R]`.
        starts: Logits row of each root, `int64 [B]`.
        drafted: Requests with drafts, `int64 [T]`.
        drafted_sizes: Number of nodes of these requests' trees, the root counted, `int64 [T]`.
        counted: Whether this is a decode step of the request, `bool [B]`.
        position_offsets: Offsets from a chain's positions to those of the trees, `int64 [tokens]`.
    """

    parents: torch.Tensor
    tree_size: torch.Tensor
    padding: torch.Tensor
    row_of_node: torch.Tensor
    cell_of_row: torch.Tensor
    request_of_row: torch.Tensor
    starts: torch.Tensor
    drafted: torch.Tensor
    drafted_sizes: torch.Tensor
    counted: torch.Tensor
    position_offsets: torch.Tensor


@dataclass(frozen=True)
class StepTrees:
    """The trees of one step, truncated to what the engine scheduled of them.

    R rows of the batch have logits: for each request those of its root and of its draft tokens. The
    root is the last accepted token, or the last token of a prefill chunk.

    Attributes:
        rows: Index of each logits row among the step's tokens, `int [R]`.
        starts: Logits row of each request's root, `int64 [B]`.
        tree_sizes: Number of nodes of each tree, the root counted, `int64 [B]`.
        request_of_row: Request of each row, `int64 [R]`.
        counted: Whether this is a decode step of the request, `bool [B]`.
        parents: Column of each node's parent, `int32 [B, N]`, padded with -1.
        position_offsets: Offsets from a chain's positions to those of the trees, `int64 [tokens]`.
        max_depth: Greatest depth of a node.
        columns: Column of each node in the tree as it was proposed, `int64 [B, N]`; -1 for padding
            and for nodes that were not proposed. None if they are those of the nodes.
        forced: Whether a grammar leaves no token but that of the node, `bool [B, N]`; None if it
            does for no node.
        given: Whether a grammar adds the node whatever was proposed, `bool [B, N]`; None if it
            adds none.
    """

    rows: torch.Tensor
    starts: LongArray
    tree_sizes: LongArray
    request_of_row: LongArray
    counted: BoolArray
    parents: IntArray
    position_offsets: LongArray
    max_depth: int
    columns: LongArray | None = None
    forced: BoolArray | None = None
    given: BoolArray | None = None

    @classmethod
    def of_batch(
        cls,
        request_ids: Sequence[str],
        scheduled: Mapping[str, Sequence[int]],
        stored: Mapping[str, StoredTree],
        num_scheduled_tokens: np.ndarray[Any, Any],
        decoding: BoolArray,
        rows: torch.Tensor,
    ) -> StepTrees:
        """Truncate the stored trees to what was scheduled of them.

        Args:
            request_ids: Names of the requests in the batch.
            scheduled: Scheduled draft tokens by request.
            stored: Trees by request.
            num_scheduled_tokens: Number of tokens of each request in the step, `int [B]`.
            decoding: Whether the request has output tokens and no unread prompt, `bool [B]`.
            rows: Index of each logits row among the step's tokens, `int [R]`.
        """
        if not any(map(scheduled.get, request_ids)):
            return cls.of_roots(num_scheduled_tokens, decoding, rows)
        sizes = np.array([1 + len(scheduled.get(name, ())) for name in request_ids])
        parents = np.full((len(sizes), sizes.max()), -1, np.int32)
        offsets = np.zeros(int(num_scheduled_tokens.sum()), np.int64)
        ends = np.cumsum(num_scheduled_tokens)
        max_depth = 0
        trees: list[StoredTree] = []
        for row, (name, size) in enumerate(zip(request_ids, sizes, strict=True)):
            tree = ROOT_ONLY
            if size > 1:
                # The scheduler pads the drafts of a request that joins, unless it has a schedule of
                # draft tokens by batch size. A chain of any tokens can be verified.
                tree = stored.get(name) or StoredTree.chain(int(size))
            parents[row, :size] = tree.parents[:size]
            trees.append(tree)
            if size > 1:
                offsets[ends[row] - size : ends[row]] = tree.depths[:size] - np.arange(size)
            max_depth = max(max_depth, int(tree.depths[:size].max()))
        return cls(
            rows=rows,
            starts=np.cumsum(sizes) - sizes,
            tree_sizes=sizes,
            request_of_row=np.repeat(np.arange(len(sizes)), sizes),
            # A preempted request computes its output again, in steps with more tokens than its tree
            # has, which are not decode steps.
            counted=decoding & (num_scheduled_tokens == sizes),
            parents=parents,
            position_offsets=offsets,
            max_depth=max_depth,
            columns=_columns([tree.columns for tree in trees], sizes),
            forced=_flags([tree.forced for tree in trees], sizes),
            given=_flags([tree.given for tree in trees], sizes),
        )

    @classmethod
    def of_roots(
        cls, num_scheduled_tokens: np.ndarray[Any, Any], decoding: BoolArray, rows: torch.Tensor
    ) -> StepTrees:
        """The trees of a step without drafts; for the arguments see `of_batch`."""
        count = len(num_scheduled_tokens)
        requests = np.arange(count)
        return cls(
            rows=rows,
            starts=requests,
            tree_sizes=np.ones_like(requests),
            request_of_row=requests,
            counted=decoding & (num_scheduled_tokens == 1),
            parents=np.full((count, 1), -1, np.int32),
            position_offsets=np.zeros(int(num_scheduled_tokens.sum()), np.int64),
            max_depth=0,
        )

    @property
    def drafted(self) -> bool:
        """Whether any request has a draft in this step."""
        return self.parents.shape[1] > 1

    def by_node(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values of rows, `[R]`, into `[B, N]`; padding repeats a request's last row."""
        if not self.drafted:
            return values[:, None]
        return values[self.tensors.row_of_node]

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values of nodes, `[B, N]`, into `[R]`."""
        return values.flatten()[self.tensors.cell_of_row] if self.drafted else values[:, 0]

    def trees(self, tokens: torch.Tensor) -> DraftTree:
        """The batch's trees, given the input token of each row, `int32 [R]`."""
        if not self.drafted:
            return DraftTree.of_roots(tokens.to(torch.int32))
        rows = self.by_node(tokens).to(torch.int32)
        tensors = self.tensors
        return DraftTree(
            rows.masked_fill(tensors.padding, NO_TOKEN), tensors.parents, tensors.tree_size
        )

    def as_proposed(self, drafts: DraftTree, verified: Verified) -> tuple[DraftTree, Verified]:
        """The trees and their outcome with each node in the column in which it was proposed."""
        if self.columns is None:
            return drafts, verified
        device = drafts.tokens.device
        return as_proposed(
            drafts,
            verified,
            on_device(self.columns, device),
            1 + int(self.columns.max()),
            len(self.rows),
            None if self.forced is None else on_device(self.forced, device),
            None if self.given is None else on_device(self.given, device),
        )

    def masks(self) -> StepMasks:
        """Attention masks of the trees with drafts."""
        tensors = self.tensors
        parents, sizes = tensors.parents, tensors.tree_size
        if len(tensors.drafted) < len(sizes):
            parents, sizes = parents[tensors.drafted], sizes[tensors.drafted]
        return StepMasks(tensors.drafted, tensors.drafted_sizes, tree_mask(parents, sizes))

    @cached_property
    def root_rows(self) -> torch.Tensor:
        """`starts` on the device."""
        if self.drafted:
            return self.tensors.starts
        return torch.arange(len(self.starts), device=self.rows.device)

    @cached_property
    def tensors(self) -> StepTensors:
        """The layout on the device, copied once per step in one transfer."""
        sizes, width = self.tree_sizes, self.parents.shape[1]
        columns = np.arange(width)
        drafted = np.flatnonzero(sizes > 1)
        column_of_row = np.arange(len(self.request_of_row)) - self.starts[self.request_of_row]
        arrays = {
            "parents": self.parents,
            "tree_size": sizes.astype(np.int32),
            "padding": columns >= sizes[:, None],
            "row_of_node": self.starts[:, None] + np.minimum(columns, sizes[:, None] - 1),
            "cell_of_row": self.request_of_row * width + column_of_row,
            "request_of_row": self.request_of_row,
            "starts": self.starts,
            "drafted": drafted,
            "drafted_sizes": sizes[drafted],
            "counted": self.counted,
            "position_offsets": self.position_offsets,
        }
        tensors = all_on_device([*arrays.values()], self.rows.device)
        return StepTensors(**dict(zip(arrays, tensors, strict=True)))


def _columns(proposed: Sequence[LongArray | None], sizes: LongArray) -> LongArray | None:
    """`StepTrees.columns` from the columns of each request's tree, before it was truncated."""
    if all(columns is None for columns in proposed):
        return None
    whole = np.arange(sizes.max())
    padded = np.full((len(proposed), len(whole)), -1)
    for row, (columns, size) in enumerate(zip(proposed, sizes, strict=True)):
        padded[row, :size] = (whole if columns is None else columns)[:size]
    return padded


def _flags(of_trees: Sequence[BoolArray | None], sizes: LongArray) -> BoolArray | None:
    """`StepTrees.forced` or `given` from the flags of each tree, before it was truncated."""
    if all(flags is None for flags in of_trees):
        return None
    padded = np.zeros((len(of_trees), sizes.max()), np.bool_)
    for row, (flags, size) in enumerate(zip(of_trees, sizes, strict=True)):
        if flags is not None:
            padded[row, :size] = flags[:size]
    return padded


@dataclass
class StepState:
    """State that an engine step passes between callbacks; dropped once the step is sampled.

    Attributes:
        trees: Layout of the step's trees.
        masks: Attention masks of the trees; None if the step has no drafts.
        grammars: What grammars allow in each row; None without grammars.
        hidden: The target's hidden states, `[tokens, d]`.
        drafts: The trees as verified.
    """

    trees: StepTrees
    masks: StepMasks | None = None
    grammars: GrammarMasks | None = None
    hidden: torch.Tensor = field(init=False)
    drafts: DraftTree = field(init=False)
