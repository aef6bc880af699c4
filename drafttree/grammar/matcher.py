"""The state of a grammar that follows one request's text, and its walk through a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from drafttree.grammar.jump_forward import JumpForward


class Matcher(Protocol):
    """A grammar's state after a request's text, which can be undone token by token."""

    def accept(self, token: int) -> bool:
        """Go on to the state after one more token.

        Returns:
            False if the grammar does not allow the token; the state stays then.
        """
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens that were accepted."""
        ...

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Write the tokens that may follow into a row of `masks`, `int32 [rows, W]`."""
        ...

    def jump_forward(self) -> JumpForward:
        """The tokens of the text that must come next; empty if none is known."""
        ...


class Walk:
    """Moves a matcher between the nodes of a tree, whose root is the matcher's state at first.

    Use it as a context: at its end the matcher is at the root again.

    Args:
        matcher: The matcher.
        parents: The parent of each node, -1 for the root at 0; may grow meanwhile.
        tokens: The token of each node; that of the root is not used.
    """

    def __init__(self, matcher: Matcher, parents: Sequence[int], tokens: Sequence[int]) -> None:
        self._matcher = matcher
        self._parents = parents
        self._tokens = tokens
        self._path: list[int] = []

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *exception: object) -> None:
        self._back_to(0)

    def enter(self, node: int) -> bool:
        """Move to a node whose ancestors the grammar allows.

        Returns:
            False if it does not allow the node; the matcher is at its parent then.
        """
        path = []
        at = node
        while at > 0:
            path.append(at)
            at = self._parents[at]
        path.reverse()
        common = 0
        for ours, wanted in zip(self._path, path, strict=False):
            if ours != wanted:
                break
            common += 1
        self._back_to(common)
        for at in path[common:]:
            if not self._matcher.accept(self._tokens[at]):
                return False
            self._path.append(at)
        return True

    def _back_to(self, depth: int) -> None:
        if len(self._path) > depth:
            self._matcher.rollback(len(self._path) - depth)
            del self._path[depth:]
