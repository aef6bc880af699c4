"""How much the nodes of a tree from two drafters are worth, learnt from what was accepted.

Neither drafter's own estimate is taken as it is: softmax probabilities and the acceptance rates of
tables are not on one scale, and a node that both propose is accepted more often than either
says. So nodes are put in classes, by depth and by what each drafter says of them, and the share of
each class that was accepted lately is its worth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from tree_kernels.source_stats import SourceStats, count

from drafttree.tree import DraftTree, Verified
from drafttree.tree_union import Candidates, TreeUnion

BUCKETS = 10
"""Classes of a drafter's estimate, each of half an octave: 1 to 0.71, 0.71 to 0.5, and so on; the
last takes all that is lower."""

STATES = BUCKETS + 2
"""What a drafter says of a node: nothing, as it has not expanded the parent; a bucket; or that the
node is not among the children that it proposes for the parent."""

LEVELS = 4
"""Classes of depth: 1, 2, 3, and 4 or more."""

PROPOSERS = ((False, False), (True, False), (False, True), (True, True))
"""Whether the first drafter, and the second, propose a node."""

MOST_TRIED = 1 << 12
"""Nodes of a class after which the count is halved, so that new ones count more."""


class _Prior(NamedTuple):
    """Where worth starts: what a drafter's estimate is worth where the other one passed it over."""

    first: float
    second: float


_PASSED_OVER = _Prior(0.6, 0.4)


class TreeWorth:
    """The learnt worth of nodes.

    Args:
        device: Where the counts are.
        weight: How much the first drafter's estimate counts in the prior of a node that both
            propose, in [0, 1]; the second's counts for the rest.

    Attributes:
        stats: Counts by class, where new outcomes count more than old ones.
        by_proposers: Counts by who proposed a node, as in `PROPOSERS`; like those by source, they
            are halved where they would overflow.
    """

    def __init__(self, device: torch.device, weight: float) -> None:
        self.stats = SourceStats.of(_priors(weight).to(device))
        self.by_proposers = SourceStats.of(torch.zeros(len(PROPOSERS), device=device))
        first, second = proposed_by(all_classes())
        # The place in `PROPOSERS` of each class.
        self._proposers = (first.int() + 2 * second.int()).to(device)

    def classes(self, union: TreeUnion, first: Candidates, second: Candidates) -> Tensor:
        """The class of each node, `int32 [B, F]`."""
        level = (union.levels - 1).clamp(0, LEVELS - 1)
        for candidates, columns in zip((first, second), union.columns, strict=True):
            level = level * STATES + _states(union, candidates, columns)
        return level

    def chances(self, classes: Tensor) -> Tensor:
        """The probability that a node is accepted once its parent is, by class; `float32`."""
        return self.stats.priors[classes.long()]

    def learn(self, classes: Tensor, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        """Count a step's outcome.

        Args:
            classes: `int32 [P, N]`, the classes of the nodes of each slot's last tree.
            slots: `int64 [B]`, the slots of the trees.
            trees: The trees as verified.
            verified: The outcome.
        """
        stats = self.stats
        stats.halve(MOST_TRIED)
        count(stats, trees.tokens, trees.parents, classes, verified.path, slots)
        # Frequent classes are halved often, so sums over classes would underrate them.
        by = self._proposers[classes[slots].long()]
        count(self.by_proposers, trees.tokens, trees.parents, by, verified.path)

    def reset(self) -> None:
        """Forget what was learnt."""
        self.stats.reset()
        self.by_proposers.reset()


def proposed_by(classes: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the first drafter and the second propose the nodes of a class, `bool`."""
    both = classes % (STATES * STATES)
    first, second = both // STATES, both % STATES
    return (first > 0) & (first <= BUCKETS), (second > 0) & (second <= BUCKETS)


def all_classes() -> Tensor:
    """The classes, `int64 [C]`."""
    return torch.arange(LEVELS * STATES * STATES)


def _states(union: TreeUnion, candidates: Candidates, columns: Tensor) -> Tensor:
    """What a drafter says of each node, `int32 [B, F]`."""
    chances = candidates.chances.gather(1, columns.clamp(min=0))
    bucket = (-2 * chances.clamp(min=1e-9).log2()).int().clamp(0, BUCKETS - 1) + 1
    # The parents that have a child proposed by the drafter.
    expanded = torch.zeros_like(candidates.tokens)
    above = candidates.parents.clamp(min=0).long()
    expanded.scatter_add_(1, above, (candidates.parents >= 0).int())
    parent = columns.gather(1, union.parents.clamp(min=0).long())
    silent = (parent < 0) | (expanded.gather(1, parent.clamp(min=0)) == 0)
    other = torch.where(silent, 0, BUCKETS + 1).int()
    return torch.where(columns >= 0, bucket, other)


def _priors(weight: float) -> Tensor:
    """The worth of each class before anything is counted, `float32 [C]`."""
    middle = 2.0 ** -((torch.arange(BUCKETS) + 0.5) / 2)
    first = torch.cat((torch.zeros(1), middle, torch.zeros(1)))[:, None]
    second = first.T
    proposes = first > 0
    both = weight * first + (1 - weight) * second
    passed = torch.zeros(STATES)
    passed[-1] = 1
    alone_first = first * (1 - passed[None, :] * (1 - _PASSED_OVER.first))
    alone_second = second * (1 - passed[:, None] * (1 - _PASSED_OVER.second))
    table = torch.where(
        proposes & proposes.T, both, torch.where(proposes, alone_first, alone_second)
    )
    return table.expand(LEVELS, STATES, STATES).reshape(-1).contiguous()
