"""Trees that Token Recycling's candidates share with those of another method.

Token Recycling's candidates, from its tables and from copies, are united with the nodes that a
model drafts, and the nodes that are worth most are verified. The candidates are chosen, not drawn,
so they need no rule of acceptance: a token that is drawn from the target, or from what a rule
leaves of it, is looked up among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tree_kernels.expansion import ExpandedTrees

from drafttree.budget import NodeBudget
from drafttree.ranks import Group
from drafttree.tree import DraftTree, Verified
from drafttree.tree_union import (
    Candidates,
    TreeUnion,
    best_first,
    best_of_union,
    kept_first,
    scores_of,
    unite,
)
from drafttree.tree_worth import PROPOSERS, TreeWorth, proposed_by
from recycle_plugin.dynamic import DynamicTreeDrafter
from recycle_plugin.shared_ranks import TablesOfFirstRank, broadcast_candidates

RankTables = DynamicTreeDrafter | TablesOfFirstRank
"""Token Recycling's drafter for shared trees, or what stands for it on the other ranks."""

_MODELS_WEIGHT = 0.7
"""How much the model's estimate counts for a node that both propose, until that is measured."""

_OF_TABLES_ALONE = 1
"""The class of nodes of trees without the model's: that of the tables' best nodes of the first
level, if the model has not expanded the root. It always has where it drafts."""


class _Ranked(NamedTuple):
    """All nodes of a step.

    Attributes:
        union: The nodes.
        expanded: Those of the tables.
        classes: The class of each node, `int32 [B, F]`.
        scores: The probability that each is accepted, `float32 [B, F]`.
    """

    union: TreeUnion
    expanded: ExpandedTrees
    classes: Tensor
    scores: Tensor


class SharedTrees:
    """Chooses the nodes of the trees.

    Args:
        tables: Token Recycling's drafter on this rank.
        num_draft_tokens: Greatest number of draft tokens of a tree.
        steps: Greatest depth of the model's nodes.
        source: Where these come from.
        learns: Whether requests share what is learnt of the worth of nodes.
        group: The tensor-parallel ranks; None if there is one.
    """

    def __init__(
        self,
        tables: RankTables,
        num_draft_tokens: int,
        steps: int,
        source: str,
        *,
        learns: bool,
        group: Group | None = None,
    ) -> None:
        self.tables = tables
        self._group = group
        self.max_depth = max(tables.max_depth, steps)
        self._num_draft_tokens = num_draft_tokens
        self._steps = steps
        self._source = source
        self._learns = learns

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        """Allocate the tables' state of requests, and the classes of their nodes."""
        self.tables.allocate(max_requests, max_model_len)
        device = self.tables.device
        self._worth = TreeWorth(device, _MODELS_WEIGHT)
        shape = max_requests, 1 + self._num_draft_tokens
        self._classes = torch.zeros(shape, dtype=torch.int32, device=device)

    def plan_alone(self, forward_seconds: Mapping[int, float]) -> NodeBudget | None:
        """Let the tables choose the trees that they draft alone, by what they cost and give.

        Args:
            forward_seconds: Seconds of a forward of the target by the number of its tokens.

        Returns:
            Their node budget; None on other ranks than the first.
        """
        return self.tables.plan_alone(forward_seconds)

    def propose_alone(self, slots: Tensor, roots: Tensor) -> DraftTree:
        """The tables' own trees under `roots [B]`, -1 for no tree."""
        self._classes.index_fill_(0, slots, _OF_TABLES_ALONE)
        return self.tables.propose(slots, roots)

    def choose(
        self, slots: Tensor, own: Candidates, most: Tensor, largest: int | None = None
    ) -> DraftTree:
        """The best nodes of the model's candidates and the tables', in breadth-first order.

        Args:
            slots: `int64 [B]`, the requests' slots.
            own: The model's candidates.
            most: `int64 [B]`, greatest number of draft tokens of each request; 0 for none.
            largest: The greatest of these numbers; None for that of all trees.
        """
        ranked = self._rank(slots, own.tokens[:, 0].masked_fill(most == 0, -1), own)
        largest = self._num_draft_tokens if largest is None else largest
        trees, columns = best_of_union(ranked.union, ranked.scores, most, largest)
        self._note(slots, ranked, columns)
        return trees

    def choose_first(
        self, slots: Tensor, own: Candidates, kept: Tensor, num_draft_tokens: int
    ) -> tuple[DraftTree, Tensor]:
        """The best nodes, from the best to the worst.

        Args:
            slots: `int64 [B]`, the requests' slots.
            own: The model's candidates, at most as many as a tree has nodes.
            kept: `bool [B]`, the requests whose trees begin with all of the model's candidates, in
                their order.
            num_draft_tokens: Draft tokens of a tree.

        Returns:
            The trees, and the column of each node among the model's candidates, `int64 [B, N]`; -1
            for nodes that are not of the model.
        """
        ranked = self._rank(slots, own.tokens[:, 0], own)
        scores = kept_first(ranked.union, ranked.scores, kept)
        trees, columns = best_first(ranked.union, scores, num_draft_tokens)
        self._note(slots, ranked, columns)
        return trees, ranked.union.columns[0].gather(1, columns).masked_fill(trees.tokens < 0, -1)

    def _rank(self, slots: Tensor, roots: Tensor, own: Candidates) -> _Ranked:
        """Unite the model's candidates with those of the tables under `roots [B]`."""
        expanded = broadcast_candidates(self.tables.candidates(slots, roots), self._group)
        above = expanded.scores.gather(1, expanded.parents.clamp(min=0).long())
        chances = torch.where(expanded.scores > 0, expanded.scores / above, 0)
        others = Candidates(expanded.tokens, expanded.parents, chances)
        union = unite(own, others, self._steps)
        classes = self._worth.classes(union, own, others)
        scores = scores_of(union, self._worth.chances(classes), self.max_depth)
        self.tables.appraise(slots, expanded)
        return _Ranked(union, expanded, classes, scores)

    def _note(self, slots: Tensor, ranked: _Ranked, columns: Tensor) -> None:
        """Keep what the nodes in these columns of the union are, until they are verified."""
        self._classes[slots, : columns.shape[1]] = ranked.classes.gather(1, columns)
        of_tables = ranked.union.columns[1].gather(1, columns)
        sources = ranked.expanded.sources.gather(1, of_tables.clamp(min=0))
        self.tables.chosen(slots, sources.masked_fill(of_tables < 0, 0))

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        """Learn from a step's outcome."""
        if trees.drafted and self._learns:
            self._worth.learn(self._classes, slots, trees, verified)
        self.tables.on_verified(slots, trees, verified)

    def close(self) -> None:
        """Save what the tables have not saved yet."""
        self.tables.close()

    def reset(self) -> None:
        """Forget everything learned."""
        self._worth.reset()
        self.tables.reset()

    def acceptance(self) -> dict[str, Any]:
        """Acceptance by who proposed a node; see `by_source` for the counts."""
        counts = self._worth.by_proposers
        tried, hit = counts.tried.tolist(), counts.hit.tolist()
        rows = []
        for (ours, theirs), *sums in zip(PROPOSERS, tried, hit, strict=True):
            if sums[0] and (ours or theirs):
                name, share = self._name(ours, theirs, "tables"), sums[1] / sums[0]
                rows.append({"source": name, "tried": sums[0], "hit": sums[1], "share": share})
        return {"sources": rows}

    def sources(self, slots: Tensor, width: int) -> list[list[str]]:
        """Who proposed each node: the model, or the tables, with the source there."""
        first, second = proposed_by(self._classes[slots, :width])
        of_tables = self.tables.sources(slots, width)
        rows = zip(first.tolist(), second.tolist(), of_tables, strict=True)
        return [[self._name(*each) for each in zip(*row, strict=True)] for row in rows]

    def _name(self, ours: bool, theirs: bool, source: str) -> str:
        """The name of a node's source; `source` is that of the tables."""
        return " and ".join([self._source] * ours + [source] * theirs)
