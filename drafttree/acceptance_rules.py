"""Rules by which a method chooses tokens from the target's distributions, in place of drawing them.

Shapes: B is the batch size, N the columns of a draft tree, R the number of rows, V the vocabulary
size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

AcceptanceRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(target float32 [B, V], nodes int32 [B]) -> tokens int32 [B]`: chooses the token after each node
from the target's distribution there. Called once per level, the roots' level first."""


class TreeRule:
    """An acceptance rule that chooses from the target's distributions after all nodes of a tree.

    A host that can compute these beforehand calls `of_trees`. Where a distribution depends on the
    accepted path in a way that cannot be computed for other nodes, it calls the rule itself level
    by level, as an `AcceptanceRule`. Both must be lossless, and for no request may the choice
    between them depend on what is drawn in the step.
    """

    def __call__(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """Choose the token after one node of each tree, as an `AcceptanceRule`."""
        raise NotImplementedError

    def of_trees(self, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Choose all tokens of a step.

        Args:
            target: `float32 [R, V]`, contiguous: the target's distributions after all nodes,
                one-hot for requests that are not sampled. They may be overwritten.
            rows: `int64 [B, N]`, the row of each node of the trees, one of its own.

        Returns:
            `int32 [B, N]`: the tokens after the nodes of the accepted path, each of which but the
            last is that of a child; -1 for all other nodes.
        """
        raise NotImplementedError
