"""Tables whose candidates share the trees of another method, with several tensor-parallel ranks.

Their state depends on their process, on files and measured times among others. So the first rank
alone has tables, and the others get its candidates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tree_kernels.expansion import ExpandedTrees

from drafttree.budget import NodeBudget
from drafttree.ranks import Group
from drafttree.tensor_parallel import NonDraftingRank, drafts_alone
from recycle_plugin.dynamic import candidate_columns
from recycle_plugin.priors import tree_depth


class TablesOfFirstRank(NonDraftingRank):
    """Stands for the first rank's tables on the others.

    Args:
        num_draft_tokens: Draft tokens of each tree.
        device: The device.
    """

    def __init__(self, num_draft_tokens: int, device: torch.device) -> None:
        super().__init__(tree_depth(num_draft_tokens))
        self.device = device
        self._columns = candidate_columns(num_draft_tokens)

    def candidates(self, slots: torch.Tensor, roots: torch.Tensor) -> ExpandedTrees:
        """Room for the first rank's."""
        return ExpandedTrees.empty(len(roots), self._columns, self.device)

    def plan_alone(self, forward_seconds: Mapping[int, float]) -> NodeBudget | None:
        """None: the first rank chooses by times."""
        return None

    def appraise(self, slots: torch.Tensor, candidates: ExpandedTrees) -> None:
        """Nothing: the first rank chooses by times."""

    def chosen(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Nothing: the first rank counts what is accepted."""


def broadcast_candidates(candidates: ExpandedTrees, group: Group | None) -> ExpandedTrees:
    """The first rank's candidates, sent between devices without waiting on the host.

    Args:
        candidates: This rank's, as many columns on each.
        group: The ranks; None if there is one.
    """
    if group is None or drafts_alone(group):
        return candidates
    scores = candidates.scores.view(torch.int32)
    parts = torch.stack((candidates.tokens, candidates.parents, candidates.sources, scores))
    group.broadcast(parts)
    tokens, parents, sources, scores = parts.unbind()
    return ExpandedTrees(tokens, parents, sources, scores.view(torch.float32))
