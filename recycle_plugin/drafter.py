"""The Token Recycling drafter (arXiv 2408.08696, section 3).

Row t of the adjacency matrix holds the target's k most likely next tokens the last time token t
was verified. A draft tree is read off the matrix; verification writes it anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tree_kernels.adjacency import recycle
from tree_kernels.gather import compact_tree, gather_tree

from drafttree.drafter import DraftTree
from recycle_plugin.config import RecycleOptions

EMPTY = -1


class RecycleDrafter:
    """Drafts static trees from the adjacency matrix `int32 [V, k]`.

    Rows never written hold -1, and nothing is drafted below a node without a row: the paper's
    zeros would draft token 0.
    """

    def __init__(self, options: RecycleOptions, vocab_size: int, device: torch.device) -> None:
        if vocab_size < options.k:
            raise ValueError(
                f"k={options.k} candidates do not fit a vocabulary of {vocab_size}: lower k"
            )
        tree = options.topology
        self.matrix = torch.full((vocab_size, options.k), EMPTY, dtype=torch.int32, device=device)
        self._hot_start = options.hot_start
        self._parents = torch.tensor(tree.parents, dtype=torch.int32, device=device)
        self._ranks = torch.tensor(tree.ranks, dtype=torch.int32, device=device)
        self._level_ends = tree.level_ends
        self.max_depth = tree.depth
        self._running: set[str] = set()

    def start(self, request_ids: Sequence[str]) -> None:
        """Hear of requests that joined; with a cold start the first one empties the matrix."""
        if not self._hot_start and not self._running:
            self.reset()
        self._running.update(request_ids)

    def propose(self, request_ids: Sequence[str], roots: torch.Tensor) -> DraftTree:
        """Read a tree off the matrix under each root (`int32 [B]`), level by level."""
        tokens = gather_tree(self.matrix, roots, self._parents, self._ranks, self._level_ends)
        return DraftTree(*compact_tree(tokens, self._parents))

    def observe(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Write the top k of the logits into the tokens' rows; the last of equal tokens wins."""
        return recycle(self.matrix, tokens, logits)[:, 0]

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget requests that ended; the matrix is shared and stays."""
        self._running.difference_update(request_ids)

    def reset(self) -> None:
        """Empty the matrix."""
        self.matrix.fill_(EMPTY)
