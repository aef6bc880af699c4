"""The options of Lyanna."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from drafttree.method import MethodOptions
from drafttree.tree import MAX_DEPTH, MAX_NODES


class LyannaOptions(MethodOptions):
    """The options of Lyanna; the defaults are those of the paper's runs.

    Attributes:
        model: the drafter's folder.
        steps: hidden states to draft, and so the tree's greatest depth.
        width: children of a node, and nodes of a level that live on.
        nodes: draft nodes of the regular tree, the root not counted.
        resample: whether what a rejected draft leaves is drafted from once more (algorithm 2).
        resample_nodes: draft nodes of that second tree.
        resample_min_steps: the second tree needs more steps left than these.
        table: in what the token info's table is kept: the target's own floats, or 8-bit ones
            (e4m3).
        fusion: whether both trees are verified together; else the second alone, before the next
            regular one.
    """

    model: str
    steps: int = Field(3, ge=1, le=MAX_DEPTH)
    width: int = Field(4, ge=1)
    nodes: int = Field(12, ge=1, le=MAX_NODES)
    resample: bool = True
    resample_nodes: int = Field(12, ge=1, le=MAX_NODES)
    resample_min_steps: int = Field(0, ge=0)
    fusion: bool = True
    table: Literal["model", "float8"] = "model"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_nodes > MAX_NODES:
            raise ValueError(
                f"nodes={self.nodes} and resample_nodes={self.resample_nodes} are more than "
                f"{MAX_NODES} together: choose fewer, or fusion=false"
            )
        if self.nodes < self.steps:
            raise ValueError(
                f"nodes={self.nodes} are fewer than steps={self.steps}: a tree of that depth has a "
                "node at least for each step"
            )
        return self

    def nodes_of(self, levels: int, budget: int) -> int:
        """The most nodes of a tree: what there is of its levels, cut to its budget."""
        return min(budget, self.width + (levels - 1) * self.width**2) if levels else 0

    @property
    def first_nodes(self) -> int:
        """The most nodes of a regular tree."""
        return self.nodes_of(self.steps, self.nodes)

    def second_nodes(self, steps: int) -> int:
        """The most nodes of a second tree, of so many steps left."""
        if not self.resample or steps <= self.resample_min_steps:
            return 0
        return self.nodes_of(steps, self.resample_nodes)

    @property
    def num_nodes(self) -> int:
        """The most nodes that are verified together, the root not counted."""
        second = self.second_nodes(self.steps - 1)
        return self.first_nodes + second if self.fusion else max(self.first_nodes, second)

    @property
    def depth(self) -> int:
        """The greatest depth of a node."""
        return self.steps
