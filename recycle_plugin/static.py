"""The paper's drafting: one static tree, read off the matrix (arXiv 2408.08696, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tree_kernels.gather import compact_tree, gather_tree
from tree_kernels.tally import Tally, count

from drafttree.drafter import DraftTree
from drafttree.tree import StaticTree
from drafttree.verify import Verified
from recycle_plugin.tables import Tables


class StaticDrafter:
    """Drafts the same topology in every step.

    Nothing is drafted below a node without a row: the paper's zeros would draft token 0.
    """

    def __init__(self, tables: Tables, tree: StaticTree) -> None:
        device = tables.matrix.device
        self.tables = tables
        self._parents = torch.tensor(tree.parents, dtype=torch.int32, device=device)
        self._ranks = torch.tensor(tree.ranks, dtype=torch.int32, device=device)
        self._level_ends = tree.level_ends
        self._paths = tree.paths
        # Here a candidate's origin is its node.
        self._tally = Tally.of(torch.zeros(1 + tree.nodes, device=device))
        self.max_depth = tree.depth

    def allot(self, slots: int, length: int) -> None:
        """Make room for which nodes the requests' last trees had, in `slots` slots."""
        self._drafted = self._parents.new_zeros(slots, len(self._parents))

    def calibrate(self, forward: Callable[[int], float], most: int) -> None:
        """What forwards cost changes nothing here."""

    def start(self, slot: int, text: Sequence[int]) -> None:
        """A request begins."""
        self.tables.begin(slot)

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """What was read is not looked at."""

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """It makes no difference here: none, `int32 [B]`."""
        return torch.full_like(slots, -1, dtype=torch.int32)

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Read a tree off the matrix under each root (`int32 [B]`), level by level."""
        self.tables.refresh()
        matrix = self.tables.matrix
        tokens = gather_tree(matrix, roots, self._parents, self._ranks, self._level_ends)
        # Which node each column is once those without a token are gone.
        self._drafted[slots] = (tokens < 0).int().sort(dim=1, stable=True).indices.int()
        return DraftTree(*compact_tree(tokens, self._parents))

    def observe(
        self, slots: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Write the top k of the logits into the tokens' rows; the last of equal tokens wins."""
        return self.tables.learn(slots, tokens, before, logits)

    def accepted(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Count which nodes were accepted; what was accepted shows in the rows."""
        count(self._tally, trees.tokens, trees.parents, self._drafted[slots], verified.path)

    def release(self, slots: Sequence[int]) -> None:
        """Requests ended; the matrix is shared and stays."""
        self.tables.end(slots)

    def reset(self) -> None:
        """Forget everything learnt, and all counts."""
        self.tables.reset()
        self._tally.reset()

    def explain(self) -> list[dict[str, Any]]:
        """There is nothing to explain."""
        return []

    def acceptance(self) -> dict[str, Any]:
        """Each node's rank path, how often its parent was accepted while it was drafted, and how
        often it was accepted too."""
        return {
            "paths": [list(path) for path in self._paths],
            "tried": self._tally.tried[1:].tolist(),
            "hit": self._tally.hit[1:].tolist(),
        }
