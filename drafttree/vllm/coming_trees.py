"""Drafted trees on their way from the device to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tree_kernels.mask import depths

from drafttree.drafter import DraftTree
from drafttree.transfer import Coming
from drafttree.vllm.step import IntArray, StoredTree


@dataclass(frozen=True)
class ComingTrees:
    """The trees of a batch, which the device may still be drafting.

    Attributes:
        request_ids: of the batch.
        wanted: `bool [B]`, whether the request is to have one.
        known: `int32 [B, 2 N + 1]`: tokens, parents and how many nodes there are.
    """

    request_ids: Sequence[str]
    wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]
    known: Coming

    @classmethod
    def of(
        cls,
        request_ids: Sequence[str],
        wanted: np.ndarray[tuple[int], np.dtype[np.bool_]],
        trees: DraftTree,
    ) -> ComingTrees:
        """Have the trees sent; nobody waits."""
        known = torch.cat((trees.tokens, trees.parents, trees.num_nodes[:, None]), 1)
        return cls(tuple(request_ids), wanted, Coming.of(known))

    def cut(self, share: int, tokens_left: IntArray) -> tuple[list[list[int]], list[StoredTree]]:
        """Wait for the trees, and cut them to what is of use.

        Args:
            share: nodes that a request may have verified in a step, the root included.
            tokens_left: `int32 [B]`, what each request may still emit.

        Returns:
            For each request its drafts in breadth-first order, and the tree of them.
        """
        known = self.known.wait()
        tokens, parents = known[:, :-1].chunk(2, 1)
        num_nodes = known[:, -1].contiguous()
        depth = depths(parents.contiguous(), num_nodes).numpy()
        # Nodes that could only emit tokens beyond the request's end are not worth verifying.
        fits = (depth < tokens_left[:, None]) & self.wanted[:, None]
        fits &= np.arange(depth.shape[1]) < np.minimum(num_nodes.numpy(), share)[:, None]
        sizes = fits.sum(1).tolist()
        drafts = [row[1:size] for row, size in zip(tokens.tolist(), sizes, strict=True)]
        trees = [
            StoredTree(parents_of[:size], depth_of[:size])
            for parents_of, depth_of, size in zip(parents.numpy(), depth, sizes, strict=True)
        ]
        return drafts, trees
