"""The options of Token Recycling."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drafttree.method import MethodOptions
from drafttree.tree import BRANCHING, MAX_NODES, StaticTree
from recycle_plugin.grown import DEPTH, ROW_PRIORS

PAPER_NODES = 80
CANDIDATES = len(ROW_PRIORS)


class RecycleOptions(MethodOptions):
    """The options of Token Recycling.

    Attributes:
        drafting: `grown` for a tree grown best first for each request in each step, `paper` for the
            paper's one static tree; `tree` asks for a static one too.
        nodes: draft nodes a tree, the root not counted. At 80 the static tree is the paper's
            (appendix, figure 5); at other sizes it is the one of highest path probability. With
            `tree` it must agree with the tree or be left out.
        tree: a JSON file of rank paths, or branching factors as in `branch:4-2-1`.
        k: candidates kept for each token; fewer than 8 for static trees only.
        hot_start: keep what was learnt from one request to the next. Off, the tables are emptied
            whenever a request arrives and no other is running.
    """

    drafting: Literal["grown", "paper"] = "grown"
    nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    tree: str | None = None
    k: int = Field(default=CANDIDATES, ge=1, le=CANDIDATES)
    hot_start: bool = True

    @model_validator(mode="before")
    @classmethod
    def _tree_is_static(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("tree") is not None:
            return {"drafting": "paper", **given}
        return given

    @cached_property
    def topology(self) -> StaticTree:
        """The static draft tree that these options ask for."""
        if self.tree is not None:
            if self.tree.startswith(BRANCHING):
                return StaticTree.from_notation(self.tree)
            return StaticTree.from_file(Path(self.tree))
        if self.nodes in (None, PAPER_NODES) and self.k == CANDIDATES:
            with as_file(files("recycle_plugin") / "token_recycling_80.json") as file:
                return StaticTree.from_file(file)
        return StaticTree.from_budget(self.nodes or PAPER_NODES, ROW_PRIORS[: self.k])

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.drafting == "grown":
            if self.tree is not None:
                raise ValueError(
                    f"tree={self.tree!r} is static but drafting='grown': leave one of them out"
                )
            if self.k != CANDIDATES:
                raise ValueError(
                    f"k={self.k} but grown trees take {CANDIDATES} candidates a token: leave k "
                    "out, or add drafting='paper'"
                )
            return self
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
        if self.drafting == "grown":
            return self.nodes or PAPER_NODES
        return self.topology.nodes

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        return DEPTH if self.drafting == "grown" else self.topology.depth
