"""The acceptance rules of RSD: recursive rejection sampling, and traversal verification."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from tree_kernels.rejection import reject_step
from tree_kernels.traversal import traverse_trees

from drafttree.acceptance_rules import TreeRule
from drafttree.tree import DraftTree


class RecursiveRejection:
    """Recursive rejection sampling, applied level by level (RSD, algorithm 3).

    B is the batch size, I the number of inner nodes, V the vocabulary size, D the maximum depth
    and K the maximum number of children of a node.

    Args:
        trees: The trees as sampled, or a breadth-first prefix of them; with other nodes anywhere
            below their roots, if these were not sampled.
        probs: `float32 [B, I, V]`, the distributions from which the children of each inner node
            were sampled. A row of zeros means that the children are the draft model's most likely
            tokens; the target's distribution after such a node must be one-hot.
        coins: `float32 [B, D + 1, K + 1]`, uniform random numbers.
        most_children: The greatest number of sampled children of a node in each level, the roots'
            level first and at most K; none in the levels after these. A GPU needs more launches for
            more children.
        columns: `int64 [B, N]`, the column that each node had when the trees were sampled, -1 for
            nodes that were not; None if it is the same. Nodes that were not sampled are not tried:
            the token that is drawn if no child is accepted may be theirs, and follows the target
            whatever they are.
    """

    def __init__(
        self,
        trees: DraftTree,
        probs: Tensor,
        coins: Tensor,
        most_children: Sequence[int],
        columns: Tensor | None = None,
    ) -> None:
        self._trees = trees
        self._probs = probs
        self._coins = coins
        self._most_children = most_children
        self._columns = columns
        self._rows = torch.arange(len(coins), device=coins.device)
        self._level = 0

    def __call__(self, target: Tensor, nodes: Tensor) -> Tensor:
        """Choose the token after each node; each call goes one level down.

        Args:
            target: `float32 [B, V]`, the target's distributions after the nodes.
            nodes: `int32 [B]`, one node of each tree.

        Returns:
            `int32 [B]`.
        """
        level, self._level = self._level, self._level + 1
        most = self._most_children[level] if level < len(self._most_children) else 0
        if most:
            at = nodes.long()[:, None]
            rows = self._draft_rows.gather(1, at)[:, 0]
            children = self._children.gather(1, at[:, :, None].expand(-1, -1, most))[:, 0]
        else:
            rows, children = torch.full_like(self._rows, -1), nodes.new_empty(len(nodes), 0)
        # The last coin is the draw's, whatever the number of children.
        coins = self._coins[:, level, -1 - most :]
        _, tokens = reject_step(
            target, self._probs.flatten(0, 1), self._rows, rows, children, coins
        )
        return tokens

    @cached_property
    def _draft_rows(self) -> Tensor:
        """The row of each node in all of `probs`, `int64 [B, N]`; -1 if it was not sampled from."""
        inner, sampled = self._probs.shape[1], self._columns
        if sampled is None:
            sampled = torch.arange(self._trees.tokens.shape[1], device=self._rows.device)
        drafted = (sampled >= 0) & (sampled < inner)
        return torch.where(drafted, self._rows[:, None] * inner + sampled, -1)

    @cached_property
    def _children(self) -> Tensor:
        """Each node's children in sampling order: tokens `int32 [B, N, K]`, padded with -1."""
        tokens, parents = self._trees.tokens, self._trees.parents
        requests, nodes = tokens.shape
        most = max(self._most_children)
        is_child = parents >= 0
        if self._columns is not None:
            is_child &= self._columns >= 0
        siblings = (parents[:, :, None] == parents[:, None, :]) & is_child[:, None, :]
        places = parents * most + siblings.tril(-1).sum(2)
        # Whatever is no child is written behind the others.
        places = torch.where(is_child, places, nodes * most)
        found = tokens.new_full((requests, nodes * most + 1), -1).scatter_(1, places, tokens)
        return found[:, :-1].view(requests, nodes, most)


class Traversal(TreeRule):
    """Traversal verification of whole trees (arXiv 2505.12398, algorithm 2).

    Where a host asks level by level, it is recursive rejection sampling.

    Args:
        trees: As for `RecursiveRejection`; so are `probs`, `coins` and `columns`.
        probs: `float32 [B, I, V]`.
        coins: `float32 [B, D + 1, K + 1]`, the coins for recursive rejection sampling.
        node_coins: `float32 [B, M]`, uniform random numbers: one for the draw after the accepted
            path, and one for each draft token of the largest tree.
        most_children: As for `RecursiveRejection`.
        columns: `int64 [B, N]`, or None.
    """

    def __init__(
        self,
        trees: DraftTree,
        probs: Tensor,
        coins: Tensor,
        node_coins: Tensor,
        most_children: Sequence[int],
        columns: Tensor | None = None,
    ) -> None:
        self._trees = trees
        self._probs = probs
        self._coins = node_coins
        self._columns = columns
        self._by_level = RecursiveRejection(trees, probs, coins, most_children, columns)

    def __call__(self, target: Tensor, nodes: Tensor) -> Tensor:
        """Choose the token after each node, as `RecursiveRejection` does."""
        return self._by_level(target, nodes)

    def of_trees(self, target: Tensor, rows: Tensor) -> Tensor:
        """Choose the accepted path of each tree, and the token that follows it."""
        requests, width = self._trees.tokens.shape
        inner = self._probs.shape[1]
        sampled = self._columns
        if sampled is None:
            sampled = torch.arange(width, device=target.device).expand(requests, -1)
        first = inner * torch.arange(requests, device=target.device)[:, None]
        return traverse_trees(
            target,
            self._probs.flatten(0, 1),
            rows,
            torch.where(sampled < inner, first + sampled, -1),
            self._trees.tokens,
            self._trees.parents,
            # Columns beyond those of the largest tree hold no nodes.
            pad(self._coins, (0, max(width - self._coins.shape[1], 0)))[:, :width],
        )
