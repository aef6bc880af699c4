"""What travels between a model runner and the scheduler, beside draft tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    """The shape of a request's tree on its way to the scheduler.

    Attributes:
        parents: The parent of each node; -1 for the root at 0.
        most_proposed: Greatest number of these nodes to verify, the root not counted.
        most: Greatest number of nodes in all, the root counted.
        max_depth: Greatest depth of a node.
        memory_version: Version of the memory of masks, which is emptied when it changes; None if
            nothing of a request's text may serve another.
        chain: Whether the tree must stay a chain.
    """

    parents: Sequence[int]
    most_proposed: int
    most: int
    max_depth: int
    memory_version: int | None = None
    chain: bool = False


class Bound(NamedTuple):
    """The shape of a request's tree as the scheduler has bound it to a grammar.

    Attributes:
        parents: The parent of each node; -1 for the root at 0.
        columns: Each node's column in the tree that was proposed; -1 for tokens that
            were not.
        forced: Whether each node is the only one that may follow its parent.
        given: Whether each node is in the tree whatever was proposed.
    """

    parents: Sequence[int]
    columns: Sequence[int]
    forced: Sequence[bool]
    given: Sequence[bool]


class Drafted(NamedTuple):
    """A tree whose nodes are in the batch already, and of which only the masks are missing.

    Attributes:
        tokens: The token of each node; -1 where there is none.
        parents: The parent of each node; -1 for the root at 0.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


Proposals = Mapping[str, Proposal | None]
"""By request; None where the draft tokens are placeholders for a tree drafted within the step."""

BoundShapes = Mapping[str, Bound]
DraftedTrees = Mapping[str, Drafted]
