"""The options of Token Recycling."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from drafttree.method import MethodOptions
from drafttree.tree import BRANCHING, MAX_NODES, StaticTree

PAPER_NODES = 80

# How often the candidate of each rank is the target's next token, measured on Spec-Bench prompts.
RANK_PRIORS = (0.30, 0.083, 0.055, 0.037, 0.025, 0.02, 0.012, 0.009)


class RecycleOptions(MethodOptions):
    """The options of Token Recycling.

    Attributes:
        nodes: draft nodes a tree, the root not counted. At 80 the tree is the paper's (appendix,
            figure 5); at other sizes it is the one of highest path probability. With `tree` it
            must agree with the tree or be left out.
        tree: a JSON file of rank paths, or branching factors as in `branch:4-2-1`.
        k: candidates kept for each token.
        hot_start: keep what was learnt from one request to the next. Off, the tables are emptied
            whenever a request arrives and no other is running.
    """

    nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    tree: str | None = None
    k: int = Field(default=8, ge=1, le=8)
    hot_start: bool = True

    @cached_property
    def topology(self) -> StaticTree:
        """The static draft tree that these options ask for."""
        if self.tree is not None:
            if self.tree.startswith(BRANCHING):
                return StaticTree.from_notation(self.tree)
            return StaticTree.from_file(Path(self.tree))
        if self.nodes in (None, PAPER_NODES) and self.k == len(RANK_PRIORS):
            with as_file(files("recycle_plugin") / "token_recycling_80.json") as file:
                return StaticTree.from_file(file)
        return StaticTree.from_budget(self.nodes or PAPER_NODES, RANK_PRIORS[: self.k])

    @model_validator(mode="after")
    def _agree(self) -> Self:
        tree = self.topology
        if self.nodes is not None and self.nodes != tree.nodes:
            raise ValueError(
                f"nodes={self.nodes} but tree={self.tree!r} has {tree.nodes} nodes: "
                "leave one of them out"
            )
        if tree.width > self.k:
            raise ValueError(
                f"tree={self.tree!r} takes candidate rank {tree.width - 1} but k={self.k} keeps "
                f"ranks 0 to {self.k - 1}: raise k or narrow the tree"
            )
        return self

    @property
    def num_nodes(self) -> int:
        """The number of draft nodes, the root not counted."""
        return self.topology.nodes

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        return self.topology.depth
