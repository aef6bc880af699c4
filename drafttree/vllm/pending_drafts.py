"""Drafted trees that are being copied from the device for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tree_kernels.mask import depths

from drafttree.transfer import AsyncHostCopy
from drafttree.tree import DraftTree
from drafttree.vllm.step import BoolArray, IntArray, StoredTree


@dataclass(frozen=True)
class PendingDrafts:
    """The trees of a batch, which the device may still be computing.

    Attributes:
        request_ids: Names of the batch's requests.
        wanted: Whether each request is drafted for, `bool [B]`.
        packed: Copy of tokens, parents and tree sizes, `int32 [B, 2 N + 1]`.
    """

    request_ids: Sequence[str]
    wanted: BoolArray
    packed: AsyncHostCopy

    @classmethod
    def of(cls, request_ids: Sequence[str], wanted: BoolArray, trees: DraftTree) -> PendingDrafts:
        """Start copying trees to the host, without waiting for them."""
        packed = torch.cat((trees.tokens, trees.parents, trees.tree_size[:, None]), 1)
        return cls(tuple(request_ids), wanted, AsyncHostCopy.of(packed))

    def truncate(
        self, max_tree_size: int, tokens_left: IntArray
    ) -> tuple[list[list[int]], list[StoredTree]]:
        """Wait for the trees, and drop the nodes that do not fit in the step or in the request.

        Args:
            max_tree_size: Greatest number of nodes, the root counted, of a request's tree.
            tokens_left: Number of tokens that each request may still emit, `int32 [B]`.

        Returns:
            The draft tokens of each request in breadth-first order, and the layout of its tree.
        """
        packed = self.packed.wait()
        tokens, parents = packed[:, :-1].chunk(2, 1)
        tree_size = packed[:, -1].contiguous()
        depth = depths(parents.contiguous(), tree_size).numpy()
        # Deeper nodes could only emit tokens beyond the request's end.
        fits = (depth < tokens_left[:, None]) & self.wanted[:, None]
        fits &= np.arange(depth.shape[1]) < np.minimum(tree_size.numpy(), max_tree_size)[:, None]
        sizes = fits.sum(1).tolist()
        drafts = [row[1:size] for row, size in zip(tokens.tolist(), sizes, strict=True)]
        trees = [
            StoredTree(parents_of[:size], depth_of[:size])
            for parents_of, depth_of, size in zip(parents.numpy(), depth, sizes, strict=True)
        ]
        return drafts, trees
