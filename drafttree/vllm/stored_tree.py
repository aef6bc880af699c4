"""The layout of a request's draft tree, kept on the host from drafting to verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafttree.arrays import BoolArray, IntArray, LongArray
from drafttree.vllm.structured.shapes import Bound


@dataclass(frozen=True)
class StoredTree:
    """The layout of a request's tree, kept on the host from drafting to verification.

    Attributes:
        parents: Column of each node's parent, which comes before it, `int32 [n]`; -1 for the root.
        depths: Depth of each node, `int32 [n]`; 0 for the root.
        columns: Column of each node in the tree as it was proposed, `int64 [n]`, -1 for a node that
            was not; None for its first n columns.
        forced: Whether a grammar leaves no token but that of the node, `bool [n]`; None if it does
            for no node.
        given: Whether a grammar adds the node whatever was proposed, `bool [n]`; None if it adds
            none.
    """

    parents: IntArray
    depths: IntArray
    columns: LongArray | None = None
    forced: BoolArray | None = None
    given: BoolArray | None = None

    @classmethod
    def bound(cls, proposed: StoredTree, shape: Bound) -> StoredTree:
        """A proposed tree after the scheduler has bound it to a grammar."""
        depths = [0]
        for parent in shape.parents[1:]:
            depths.append(1 + depths[parent])
        columns = np.array(shape.columns, np.int64)
        if proposed.columns is not None:
            columns = np.where(columns < 0, -1, proposed.columns[columns])
        layout = np.array(shape.parents, np.int32), np.array(depths, np.int32)
        return cls(*layout, columns, _flags(shape.forced), _flags(shape.given))

    @classmethod
    def chain(cls, size: int) -> StoredTree:
        """A chain of `size` nodes, the root counted."""
        return cls(np.arange(-1, size - 1, dtype=np.int32), np.arange(size, dtype=np.int32))

    def selected(self, columns: LongArray) -> StoredTree:
        """The tree of some of the nodes: with each its parent, in ascending columns."""
        size = len(columns)
        if not size or columns[-1] == size - 1:
            return StoredTree(self.parents[:size], self.depths[:size])
        place = np.full(len(self.parents), -1, np.int32)
        place[columns] = np.arange(size)
        parents = place[self.parents[columns]]
        parents[0] = -1
        return StoredTree(parents, self.depths[columns], columns)


def _flags(values: Sequence[bool]) -> BoolArray | None:
    """An array of these, `bool [n]`; None if none is true."""
    return np.array(values, np.bool_) if any(values) else None


ROOT_ONLY = StoredTree.chain(1)
