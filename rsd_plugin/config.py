"""The options of RSD."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

from pydantic import model_validator

from drafttree.method import MethodOptions
from drafttree.tree import BRANCHING, MAX_DEPTH, MAX_NODES, StaticTree

_BEAM = re.compile(r"beam:(\d+)x(\d+)")


@dataclass(frozen=True)
class Shape:
    """The levels of a tree that is drawn anew each step.

    Attributes:
        widths: the most nodes of each level, the root's not counted.
        factors: RSD-C's children under every node of the level before; None for RSD-S, whose
            levels are beams.
    """

    widths: tuple[int, ...]
    factors: tuple[int, ...] | None


class RsdOptions(MethodOptions):
    """The options of RSD.

    Attributes:
        model: the draft model, a folder in Hugging Face's layout.
        tree: `beam:WxL` keeps the W best nodes at each of L levels (RSD-S), `branch:b0-b1-...`
            draws b0 children of the root, b1 of each of those and so on (RSD-C). `beam:1xL` and
            `branch:1-...-1` are speculative sampling with a chain.
    """

    model: str
    tree: str = "beam:3x5"

    @cached_property
    def shape(self) -> Shape:
        """The levels that `tree` asks for."""
        if self.tree.startswith(BRANCHING):
            tree = StaticTree.from_notation(self.tree)
            widths = tuple(end - start for start, end in pairwise(tree.level_ends))
            factors = tuple(width // above for above, width in pairwise((1, *widths)))
            return Shape(widths, factors)
        found = _BEAM.fullmatch(self.tree)
        if found is None:
            raise ValueError(
                f"tree={self.tree!r} is not known: write beam:3x5 (width x length) or "
                f"{BRANCHING}3-2-1 (children at each level)"
            )
        width, length = int(found[1]), int(found[2])
        if not (width >= 1 and 1 <= length <= MAX_DEPTH and width * length <= MAX_NODES):
            raise ValueError(
                f"tree={self.tree!r} is out of range: use a width of 1 or more, 1 to {MAX_DEPTH} "
                f"levels and at most {MAX_NODES} nodes"
            )
        return Shape((width,) * length, None)

    @model_validator(mode="after")
    def _has_a_shape(self) -> Self:
        _ = self.shape
        return self

    @property
    def num_nodes(self) -> int:
        """The number of draft nodes, the root not counted."""
        return sum(self.shape.widths)

    @property
    def depth(self) -> int:
        """The number of levels."""
        return len(self.shape.widths)
