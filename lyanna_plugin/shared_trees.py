"""Trees that Lyanna shares with Token Recycling.

Token Recycling's candidates, from its tables and from copies, and Lyanna's own are united, and the
nodes that are worth most are drafted. All nodes are chosen deterministically, so verification is as
lossless as without them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttree.tree import DraftTree, Verified
from drafttree.tree_union import Candidates, best_of_union, scores_of, unite
from drafttree.tree_worth import TreeWorth, all_classes, proposed_by
from recycle_plugin import DynamicTreeDrafter

_LYANNAS_WEIGHT = 0.7
"""How much Lyanna's estimate counts for a node that both propose, until that is measured."""

_NAMES = {
    (True, False): "draft layer",
    (False, True): "tables",
    (True, True): "draft layer and tables",
}


class SharedTrees:
    """Chooses the nodes of the trees.

    Args:
        tables: Token Recycling's drafter.
        num_draft_tokens: Greatest number of draft tokens of a tree.
        steps: Greatest depth of Lyanna's nodes.
        learns: Whether requests share what is learnt of the worth of nodes.
    """

    def __init__(
        self, tables: DynamicTreeDrafter, num_draft_tokens: int, steps: int, *, learns: bool
    ) -> None:
        self.tables = tables
        self.max_depth = max(tables.max_depth, steps)
        self._num_draft_tokens = num_draft_tokens
        self._steps = steps
        self._learns = learns

    def allocate(self, max_requests: int, max_model_len: int, device: torch.device) -> None:
        """Allocate the tables' state of requests, and the classes of their nodes."""
        self.tables.allocate(max_requests, max_model_len)
        self._worth = TreeWorth(device, _LYANNAS_WEIGHT)
        shape = max_requests, 1 + self._num_draft_tokens
        self._classes = torch.zeros(shape, dtype=torch.int32, device=device)

    def choose(self, slots: Tensor, own: Candidates, most: Tensor) -> DraftTree:
        """The best nodes of Lyanna's candidates and the tables'.

        Args:
            slots: `int64 [B]`, the requests' slots.
            own: Lyanna's candidates.
            most: `int64 [B]`, greatest number of draft tokens of each request; 0 for none.
        """
        roots = own.tokens[:, 0].masked_fill(most == 0, -1)
        expanded = self.tables.candidates(slots, roots)
        above = expanded.scores.gather(1, expanded.parents.clamp(min=0).long())
        chances = torch.where(expanded.scores > 0, expanded.scores / above, 0)
        others = Candidates(expanded.tokens, expanded.parents, chances)
        union = unite(own, others, self._steps)
        classes = self._worth.classes(union, own, others)
        scores = scores_of(union, self._worth.chances(classes), self.max_depth)
        trees, columns = best_of_union(union, scores, most, self._num_draft_tokens)
        self._classes[slots] = classes.gather(1, columns)
        of_tables = union.columns[1].gather(1, columns)
        sources = expanded.sources.gather(1, of_tables.clamp(min=0)).masked_fill(of_tables < 0, 0)
        self.tables.chosen(slots, sources)
        return trees

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        """Learn from a step's outcome."""
        if trees.drafted and self._learns:
            self._worth.learn(self._classes, slots, trees, verified)
        self.tables.on_verified(slots, trees, verified)

    def reset(self) -> None:
        """Forget everything learned."""
        self._worth.reset()
        self.tables.reset()

    def acceptance(self) -> dict[str, Any]:
        """Acceptance by who proposed a node, and by the tables' sources."""
        tried, hit = self._worth.stats.tried.cpu(), self._worth.stats.hit.cpu()
        first, second = proposed_by(all_classes())
        rows = []
        for (ours, theirs), name in _NAMES.items():
            which = (first == ours) & (second == theirs)
            sums = int(tried[which].sum()), int(hit[which].sum())
            if sums[0]:
                share = sums[1] / sums[0]
                rows.append({"source": name, "tried": sums[0], "hit": sums[1], "share": share})
        return {"sources": rows}

    def sources(self, slots: Tensor, width: int) -> list[list[str]]:
        """Who proposed each node: Lyanna, or the tables, with the source there."""
        first, second = proposed_by(self._classes[slots, :width])
        of_tables = self.tables.sources(slots, width)
        rows = zip(first.tolist(), second.tolist(), of_tables, strict=True)
        return [[_name(*each) for each in zip(*row, strict=True)] for row in rows]


def _name(ours: bool, theirs: bool, source: str) -> str:
    """The name of a node's source."""
    names = ["draft layer"] * ours + [source] * theirs
    return " and ".join(names)


def united_steps(regular: Candidates, second: Candidates, steps: int) -> Candidates:
    """The candidates of a regular tree and of a second one, whose estimates are older."""
    union = unite(regular, second, steps)
    at, other = union.columns
    chances = torch.where(
        at >= 0,
        regular.chances.gather(1, at.clamp(min=0)),
        second.chances.gather(1, other.clamp(min=0)),
    ).masked_fill((at < 0) & (other < 0), 0)
    return Candidates(union.tokens, union.parents, chances)
