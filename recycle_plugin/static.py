"""Static trees, filled from the adjacency matrix (arXiv 2408.08696, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from tree_kernels.gather import compact_tree, gather_tree
from tree_kernels.source_stats import SourceStats, count

from drafttree.drafter import ModelFreeDrafter, PrimeForward
from drafttree.tree import DraftTree, StaticTree, Verified
from recycle_plugin.sources import matrix_rank
from recycle_plugin.tables import Tables


class StaticTreeDrafter(ModelFreeDrafter):
    """Drafts the same topology in every step.

    Nodes below a token whose row is still unknown are left out of the tree. The paper initialises
    rows with zeros, which would draft token 0 there.

    Args:
        tables: Tables of the engine; only the adjacency matrix is read.
        tree: Topology of all trees.
    """

    def __init__(self, tables: Tables, tree: StaticTree) -> None:
        device = tables.matrix.device
        self.tables = tables
        self._parents = torch.tensor(tree.parents, dtype=torch.int32, device=device)
        self._ranks = torch.tensor(tree.ranks, dtype=torch.int32, device=device)
        self._level_ends = tree.level_ends
        self._paths = tree.paths
        # The source of a candidate is its node in the topology.
        self._source_stats = SourceStats.of(torch.zeros(tree.tree_size, device=device))
        self.max_depth = tree.depth

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        """Allocate, for each slot, the record of the nodes in its last tree."""
        self._drafted = self._parents.new_zeros(max_requests, len(self._parents))

    def prime(self, forward: PrimeForward, max_tokens: int, *, idle: bool) -> tuple[int, int]:
        """Compute rows of the adjacency matrix; see `storage.priming`."""
        return self.tables.prime(forward, max_tokens, idle=idle)

    def start(self, slot: int, text: Sequence[int]) -> None:
        """Register a request that starts in a slot."""
        self.tables.begin(slot)

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Fill the topology under each root (`int32 [B]`) from the matrix, level by level."""
        matrix = self.tables.matrix
        tokens = gather_tree(matrix, roots, self._parents, self._ranks, self._level_ends)
        *tree, columns = compact_tree(tokens, self._parents)
        self._drafted[slots] = columns
        return DraftTree(*tree)

    def observe(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        previous: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Write the top k tokens into the rows of `tokens`; the last duplicate wins."""
        return self.tables.learn(slots, tokens, previous, logits)

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Update the acceptance statistics of each node."""
        count(self._source_stats, trees.tokens, trees.parents, self._drafted, verified.path, slots)

    def check_remembers(self) -> None:
        """Refuse: texts are copied by dynamic trees alone.

        Raises:
            ValueError: Always.
        """
        raise ValueError("Token Recycling remembers no texts with a static tree: leave tree out")

    def release(self, slots: Sequence[int]) -> None:
        """Unregister finished requests; the matrix is shared and stays."""
        self.tables.end(slots)

    def preserved(self) -> AbstractContextManager[None]:
        """A context after which the tables are as before."""
        return self.tables.preserved()

    def close(self) -> None:
        """Save what is not saved yet."""
        self.tables.close()

    def reset(self) -> None:
        """Forget everything learned and all statistics."""
        self.tables.reset()
        self._source_stats.reset()

    def acceptance(self) -> dict[str, Any]:
        """Acceptance by node.

        Returns:
            `paths`, the rank path of each node; `tried`, the number of times it was drafted under
            an accepted parent; `hit`, the number of times it was accepted. Both of a node are
            halved when it was tried more than 2^20 times.
        """
        return {
            "paths": [list(path) for path in self._paths],
            "tried": self._source_stats.tried[1:].tolist(),
            "hit": self._source_stats.hit[1:].tolist(),
        }

    def sources(self, slots: torch.Tensor, width: int) -> list[list[str]]:
        """The rank of each node in its parent's row of the matrix, from 1."""
        ranks = self._ranks[self._drafted[slots, :width].long()]
        return [[matrix_rank(1 + rank) for rank in row] for row in ranks.tolist()]
