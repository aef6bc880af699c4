"""Drafted trees that are being copied from the device for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from tree_kernels.mask import depths

from drafttree.arrays import BoolArray, IntArray
from drafttree.transfer import AsyncHostCopy
from drafttree.tree import DraftTree
from drafttree.vllm.stored_tree import StoredTree


@dataclass(frozen=True)
class PendingDrafts:
    """The trees of a batch, which the device may still be computing.

    Attributes:
        request_ids: Names of the batch's requests.
        wanted: Whether each request is drafted for, `bool [B]`.
        packed: Copy of tokens, parents, tree sizes and the numbers of draft tokens to verify,
            `int32 [B, 2 N + 2]`.
    """

    request_ids: Sequence[str]
    wanted: BoolArray
    packed: AsyncHostCopy

    @classmethod
    def of(
        cls,
        request_ids: Sequence[str],
        wanted: BoolArray,
        trees: DraftTree,
        verified: torch.Tensor | None = None,
    ) -> PendingDrafts:
        """Start copying trees to the host, without waiting for them.

        Args:
            request_ids: Names of the batch's requests.
            wanted: Whether each request is drafted for, `bool [B]`.
            trees: Their trees.
            verified: How many draft tokens of each are to be verified, `int32 [B]`; None for all.
        """
        size = trees.tree_size
        verified = size - 1 if verified is None else verified
        packed = torch.cat((trees.tokens, trees.parents, size[:, None], verified[:, None]), 1)
        return cls(tuple(request_ids), wanted, AsyncHostCopy.of(packed))

    def truncate(
        self,
        max_tree_size: int | IntArray,
        tokens_left: IntArray,
        stops: Sequence[Set[int]] | None = None,
    ) -> tuple[list[list[int]], list[StoredTree]]:
        """Wait for the trees, and drop the nodes that do not fit in the step or in the request.

        Args:
            max_tree_size: Greatest number of nodes, the root counted, of a request's tree: one for
                all, or `int32 [B]`.
            tokens_left: Number of tokens that each request may still emit, `int32 [B]`.
            stops: The tokens that end each request. Nodes below them are dropped, which could
                only be emitted after the end; None for no such tokens.

        Returns:
            The draft tokens of each request, and the layout of its tree.
        """
        packed = self.packed.wait().numpy()
        width = packed.shape[1] // 2 - 1
        tokens, parents = packed[:, :width].tolist(), packed[:, width : 2 * width].copy()
        tree_size = packed[:, -2].copy()
        depth = depths(torch.from_numpy(parents), torch.from_numpy(tree_size)).numpy()
        # Deeper nodes could only emit tokens beyond the request's end.
        fits = (depth < tokens_left[:, None]) & self.wanted[:, None]
        fits &= np.arange(width) < tree_size[:, None]
        for row, ends in enumerate(stops or ()):
            # The root does not end its request, which has gone on.
            if not ends.isdisjoint(tokens[row][1:]):
                fits[row] &= _can_be_emitted(tokens[row], parents[row].tolist(), ends)
        drafts, trees = [], []
        sizes = np.broadcast_to(np.asarray(max_tree_size), len(fits))
        rows = zip(tokens, parents, depth, fits, sizes, strict=True)
        for tokens_of, parents_of, depth_of, fits_of, size in rows:
            columns = np.flatnonzero(fits_of)[:size]
            drafts.append([tokens_of[column] for column in columns[1:]])
            trees.append(StoredTree(parents_of, depth_of).selected(columns))
        return drafts, trees

    def to_verify(self) -> dict[str, int]:
        """How many draft tokens of each request are to be verified; waits for the trees."""
        return dict(zip(self.request_ids, self.packed.wait()[:, -1].tolist(), strict=True))


def _can_be_emitted(tokens: Sequence[int], parents: Sequence[int], ends: Set[int]) -> BoolArray:
    """Whether no ancestor of a node but the root is a token that ends the request."""
    below = np.zeros(len(tokens), np.bool_)
    for column, parent in enumerate(parents):
        below[column] = parent >= 0 and ((parent > 0 and tokens[parent] in ends) or below[parent])
    return ~below
