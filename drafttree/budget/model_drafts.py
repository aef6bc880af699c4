"""What a step tells of trees that a model drafted, where they are chosen some steps ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafttree.arrays import IntArray


@dataclass(frozen=True)
class ModelDrafts:
    """The trees of B requests, what was accepted, and what they took.

    Attributes:
        parents: Parents of the trees' columns, `int32 [B, N]`; -1 for roots and where there is no
            node.
        path: Columns of the accepted nodes, `int32 [B, D + 1]`; -1 behind the last one.
        seconds: Time of drafting.
        read_tokens: Tokens that the model had missed, and has read in this step.
        read_seconds: Time that this took, which is no part of `seconds`.
        unread: Tokens of the step's requests that the model has missed when the step ends.
    """

    parents: IntArray
    path: IntArray
    seconds: float
    read_tokens: int = 0
    read_seconds: float = 0.0
    unread: int = 0

    def of(self, places: Sequence[int]) -> ModelDrafts:
        """The same with the trees of some of the requests alone."""
        return replace(self, parents=self.parents[places], path=self.path[places])
