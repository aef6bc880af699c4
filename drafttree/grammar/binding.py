"""Binds a drafted tree to a grammar before it is verified.

Nodes that the grammar forbids are dropped, so that the next best ones take their places. Where it
leaves a single token, that token follows with certainty, and is drafted whether or not it was
proposed. Where it leaves a single text in several tokens, the tokenizer's are drafted, and where
it leaves a few tokens, the one that was taken when it left the same ones before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafttree.grammar.mask_memory import MaskMemory
from drafttree.grammar.masks import allows, count_allowed, sole_token
from drafttree.grammar.matcher import Matcher, Walk

NOT_PROPOSED = -1

LEAST_SHARE = 0.3
"""Least estimated probability of a chain of remembered tokens; no further token is added below."""


@dataclass
class BoundTree:
    """A tree that a grammar allows, its most probable nodes first.

    Attributes:
        tokens: The token of each node; that of the root is not used.
        parents: The parent of each node, which comes before it; -1 for the root at 0.
        columns: Each node's column in the tree as proposed; -1 for tokens that were not proposed.
        forced: Whether each node is the only one that may follow its parent.
        given: Whether each node is certain or likely, and so in the tree whatever was proposed.
        masks: The nodes' masks, `int32 [n, W]`.
    """

    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [-1])
    columns: list[int] = field(default_factory=lambda: [0])
    forced: list[bool] = field(default_factory=lambda: [False])
    given: list[bool] = field(default_factory=lambda: [False])
    masks: torch.Tensor = field(init=False)


def bind_tree(
    matcher: Matcher,
    tokens: Sequence[int],
    parents: Sequence[int],
    masks: torch.Tensor,
    *,
    most_proposed: int,
    most: int,
    max_depth: int,
    memory: MaskMemory | None = None,
    chain: bool = False,
) -> BoundTree:
    """Select the nodes of a tree that a grammar allows, and add what it makes certain or likely.

    Args:
        matcher: The grammar's state at the root.
        tokens: The token of each node as proposed, from the most to the least probable one; -1
            where there is no node. That of the root is not used.
        parents: The parent of each node, which comes before it; -1 for the root at 0.
        masks: Where masks are written, `int32 [rows, W]`, of at least `most` rows.
        most_proposed: Greatest number of nodes that were proposed, the root not counted.
        most: Greatest number of nodes in all, the root counted.
        max_depth: Greatest depth of a node.
        memory: What was taken where grammars left few tokens; None for no such memory.
        chain: Whether the tree must be a chain, each node the child of the one before.

    Returns:
        The tree; its masks are rows of `masks`.
    """
    bound = BoundTree()
    binding = _Binding(matcher, tokens, parents, masks, most, max_depth, memory, chain, bound)
    with Walk(matcher, bound.parents, bound.tokens) as walk:
        binding.run(walk, most_proposed)
    bound.masks = masks[: len(bound.tokens)]
    return bound


class _Binding:
    def __init__(
        self,
        matcher: Matcher,
        tokens: Sequence[int],
        parents: Sequence[int],
        masks: torch.Tensor,
        most: int,
        max_depth: int,
        memory: MaskMemory | None,
        chain: bool,
        bound: BoundTree,
    ) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._parents = parents
        self._masks, self._rows = masks, masks.numpy()
        self._most = most
        self._max_depth = max_depth
        self._memory = memory
        self._chain = chain
        self._bound = bound
        self._depths = [0]
        # The node of each column that is taken, and the column of each proposed child.
        self._taken = {0: 0}
        self._proposed = {
            (parent, token): column
            for column, (parent, token) in enumerate(zip(parents, tokens, strict=True))
            if column and token >= 0
        }
        self._num_proposed = 0

    def run(self, walk: Walk, most_proposed: int) -> None:
        self._matcher.fill(self._masks, 0)
        self._force(walk, 0)
        for column in range(1, len(self._tokens)):
            if self._num_proposed >= most_proposed:
                break
            node = self._taken.get(self._parents[column])
            token = self._tokens[column]
            if column in self._taken or node is None or token < 0:
                continue
            if allows(self._rows[node], token):
                self._force(walk, self._add(walk, node, token, column))

    def _force(self, walk: Walk, node: int | None) -> None:
        """Add the tokens that are certain or likely after a node, one after another."""
        share = 1.0
        while node is not None:
            token = sole_token(self._rows[node])
            if token is not None:
                node = self._follow(walk, node, token, forced=True)
                continue
            last = self._jump_forward(walk, node)
            if last == node:
                taken = self._memory and self._memory.guess(self._rows[node])
                if not taken or not allows(self._rows[node], taken.token):
                    return
                share *= taken.share
                if share < LEAST_SHARE:
                    return
                last = self._follow(walk, node, taken.token, forced=False)
            node = last

    def _jump_forward(self, walk: Walk, node: int) -> int | None:
        """Add the tokens of a text that could have other tokens too.

        Returns:
            The last node, or the given one if there are none; None if there is no more room.
        """
        tokens, last_bytes = self._matcher.jump_forward()
        at = node
        for place, token in enumerate(tokens, 1):
            row = self._rows[at]
            if not allows(row, token):
                break
            # There is a beginning of the last token for each of its bytes. If more tokens are
            # allowed, some go on beyond the text, and the tokenizer may take one of those.
            if place == len(tokens) and count_allowed(row) > last_bytes:
                break
            below = self._follow(walk, at, token, forced=sole_token(row) == token)
            if below is None:
                return None
            at = below
        return at

    def _follow(self, walk: Walk, node: int, token: int, *, forced: bool) -> int | None:
        """Add a token that the grammar suggests, which the drafter may have proposed too."""
        column = self._proposed.get((self._bound.columns[node], token), NOT_PROPOSED)
        return self._add(walk, node, token, column, forced=forced, given=True)

    def _add(
        self,
        walk: Walk,
        parent: int,
        token: int,
        column: int,
        *,
        forced: bool = False,
        given: bool = False,
    ) -> int | None:
        """Add a node and fill its mask, if there is room and the grammar takes it."""
        bound, node = self._bound, len(self._bound.tokens)
        if node >= self._most or self._depths[parent] >= self._max_depth:
            return None
        if self._chain and parent != node - 1:
            return None
        bound.tokens.append(token)
        bound.parents.append(parent)
        bound.columns.append(column)
        bound.forced.append(forced)
        bound.given.append(given)
        if not walk.enter(node):
            lists = bound.tokens, bound.parents, bound.columns, bound.forced, bound.given
            for values in lists:
                values.pop()
            return None
        self._depths.append(self._depths[parent] + 1)
        self._matcher.fill(self._masks, node)
        if column != NOT_PROPOSED:
            self._taken[column] = node
            self._num_proposed += 1
        return node
