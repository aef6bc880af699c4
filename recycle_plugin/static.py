"""The paper's drafting: one static tree, read off the matrix (arXiv 2408.08696, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tree_kernels.gather import compact_tree, gather_tree

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
        self.max_depth = tree.depth

    def allot(self, slots: int, length: int) -> None:
        """Requests have no state here."""

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
        return DraftTree(*compact_tree(tokens, self._parents))

    def observe(
        self, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Write the top k of the logits into the tokens' rows; the last of equal tokens wins."""
        return self.tables.learn(tokens, before, logits)

    def accepted(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """What was accepted shows in the rows."""

    def release(self, slots: Sequence[int]) -> None:
        """Requests ended; the matrix is shared and stays."""
        self.tables.end(slots)

    def reset(self) -> None:
        """Forget everything learnt."""
        self.tables.reset()

    def explain(self) -> list[dict[str, Any]]:
        """There is nothing to explain."""
        return []
