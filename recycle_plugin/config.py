"""The options of Token Recycling."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from drafttree.method import MethodOptions
from drafttree.tree import BRANCHING, MAX_NODES, StaticTree
from recycle_plugin.priors import DEPTH, ROW_PRIORS

PAPER_NODES = 80
CANDIDATES = len(ROW_PRIORS)


class RecycleOptions(MethodOptions):
    """The options of Token Recycling.

    Attributes:
        drafting: `grown` for a tree grown best first for each request in each step, `paper` for the
            paper's one static tree; `tree` asks for a static one too.
        nodes: draft nodes a tree, the root not counted; `auto` for as many as pay in each step, at
            most `max_nodes`. At 80 the static tree is the paper's (appendix, figure 5); at other
            sizes it is the one of highest path probability. With `tree` it must agree with the tree
            or be left out. A static tree has 80 if nothing is said.
        max_nodes: of a tree with `nodes="auto"`; what the engine keeps room for.
        tree: a JSON file of rank paths, or branching factors as in `branch:4-2-1`.
        k: candidates kept for each token; fewer than 8 for static trees only.
        prime: begin with what the target says after each token alone, which is made once for a
            model and kept in the user's cache.
        hot_start: keep what was learnt from one request to the next. Off, all of it is forgotten
            whenever a request arrives and no other is running. A file's name: load what was learnt
            from it at start, if it is there, and save it there.
        sharing: `engine`: requests learn from one another. `request`: each learns for itself over
            what was primed, so that no one's text shows in the time that another's answer takes.
    """

    drafting: Literal["grown", "paper"] = "grown"
    nodes: int | Literal["auto"] = "auto"
    max_nodes: int = Field(default=PAPER_NODES, ge=1, le=MAX_NODES)
    tree: str | None = None
    k: int = Field(default=CANDIDATES, ge=1, le=CANDIDATES)
    prime: bool = True
    hot_start: bool | Path = True
    sharing: Literal["engine", "request"] = "engine"

    @classmethod
    def sized(cls, given: dict[str, Any], nodes: int) -> dict[str, Any]:
        """The host's count bounds `auto`, and is the size of a static tree that has none."""
        if given.get("tree") is not None:
            return given
        if given.get("drafting") == "paper":
            return {"nodes": nodes, **given}
        return {"max_nodes": nodes, **given} if given.get("nodes", "auto") == "auto" else given

    @field_validator("nodes", mode="before")
    @classmethod
    def _count_or_auto(cls, given: Any) -> Any:
        if given == "auto" or (type(given) is int and 1 <= given <= MAX_NODES):
            return given
        raise ValueError(f"use a number from 1 to {MAX_NODES}, or 'auto'")

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
        nodes = PAPER_NODES if self.nodes == "auto" else self.nodes
        if (nodes, self.k) == (PAPER_NODES, CANDIDATES):
            with as_file(files("recycle_plugin") / "token_recycling_80.json") as file:
                return StaticTree.from_file(file)
        return StaticTree.from_budget(nodes, ROW_PRIORS[: self.k])

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if "max_nodes" in self.model_fields_set and (
            self.nodes != "auto" or self.drafting == "paper"
        ):
            raise ValueError(
                f"max_nodes={self.max_nodes} bounds nodes='auto' of grown trees: leave it out"
            )
        if self.sharing == "request" and (self.drafting, self.hot_start) != ("grown", True):
            raise ValueError(
                "sharing='request' keeps nothing of a request and is for grown trees: leave "
                "hot_start, tree and drafting out"
            )
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
        if self.nodes not in ("auto", tree.nodes):
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
        """The most draft nodes of a tree, the root not counted."""
        if self.drafting == "paper":
            return self.topology.nodes
        return self.max_nodes if self.nodes == "auto" else self.nodes

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        return DEPTH if self.drafting == "grown" else self.topology.depth
