"""The shapes of drafted trees, kept on the device until they are verified."""

from __future__ import annotations

import torch

from drafttree.tree import DraftTree

NO_NODE = -1


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
        self.parents = torch.full((requests, 1 + nodes), NO_NODE, dtype=torch.int32, device=device)

    def keep(self, rows: torch.Tensor, trees: DraftTree) -> None:
        """Keep the trees of the requests in `rows`, `int64 [B]`."""
        missing = self.parents.shape[1] - trees.parents.shape[1]
        self.parents[rows] = torch.nn.functional.pad(trees.parents, (0, missing), value=NO_NODE)

    def of(self, rows: torch.Tensor, sizes: torch.Tensor, width: int) -> torch.Tensor:
        """The parents of the nodes that a step verifies, `int32 [B, width]`.

        Args:
            rows: `int64 [B]`.
            sizes: Number of each tree's columns that are verified, the root's counted, `int [B]`. A
                cut tree is one too, as parents come before their children.
            width: The greatest of the sizes.
        """
        columns = torch.arange(width, device=rows.device)
        return self.parents[rows, :width].masked_fill(columns >= sizes[:, None], NO_NODE)
