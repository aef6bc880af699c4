"""The shapes of drafted trees, kept on the device until they are verified."""

from __future__ import annotations

import torch
from tree_kernels.kept_trees import keep_trees

from drafttree.tree import NO_TOKEN, DraftTree


class KeptTrees:
    """Each request's tree, by the request's row in the engine's own state.

    The tokens are where the engine keeps a request's draft tokens.

    Args:
        requests: Number of rows.
        nodes: Greatest number of draft tokens of a tree.
        device: Where the trees are.

    Attributes:
        parents: `int32 [requests, 1 + nodes]`, the column of each node's parent; -1 for roots and
            where there is no node.
    """

    def __init__(self, requests: int, nodes: int, device: torch.device) -> None:
        self.parents = torch.full((requests, 1 + nodes), NO_TOKEN, dtype=torch.int32, device=device)

    def keep(self, rows: torch.Tensor, trees: DraftTree, last: torch.Tensor) -> torch.Tensor:
        """Keep trees.

        Args:
            rows: The requests' rows, integers `[B]`.
            trees: Their trees.
            last: `int32 [B]`, the last token of each text.

        Returns:
            `int64 [B, nodes]`, the draft tokens; the last token of the text where there is no node.
        """
        return keep_trees(self.parents, rows, trees.tokens, trees.parents, last)
