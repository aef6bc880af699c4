"""The shape of a step's draft trees, which a drafter plans before it drafts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeShape:
    """The shape of the draft trees of a step.

    Attributes:
        depth: Levels of draft tokens; 0 for no drafts.
        width: Greatest number of children of a node, 1 for a chain.
        nodes: Draft tokens of a tree.
    """

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.nodes) < (1 if self.nodes else 0):
            raise ValueError(f"{self}: all must be 1 or more, or nodes must be 0")
