"""The options of Token Recycling."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from drafttree.deprecation import Deprecation
from drafttree.method import MethodOptions
from drafttree.tree import BRANCHING, MAX_DRAFT_TOKENS, StaticTree
from recycle_plugin.priors import ROW_PRIORS, tree_depth

PAPER_DRAFT_TOKENS = 80
CANDIDATES = len(ROW_PRIORS)
DYNAMIC = "dynamic"
STATIC = "static"

FORMER_DRAFTING = {
    former: Deprecation(
        name=f"drafting={former}",
        of="Token Recycling",
        instead=f"tree={tree}",
        since="0.2.0",
        gone_in="0.3.0",
    )
    for former, tree in (("grown", DYNAMIC), ("paper", STATIC))
}
"""The values of `drafting`, the former name of `tree`."""

logger = logging.getLogger(__name__)


class RecycleOptions(MethodOptions):
    """The options of Token Recycling."""

    tree: str = Field(
        default=DYNAMIC,
        description="The shape of draft trees. `dynamic`: each request gets its own tree in every "
        "step, built best first from the adjacency matrix, the bigram table and copies of what "
        "followed the same text earlier. `static`: one fixed tree; with 80 draft tokens it is the "
        "paper's (appendix, figure 5), with other sizes the tree of highest path probability. "
        "`branch:4-2-1`: a static tree with these numbers of children at each level. Anything "
        'else is the path of a JSON file with a static tree, `{"paths": [[0], [1], [0, 0], ...]}`, '
        "where each path lists the candidate ranks from the root to a node.",
    )
    nodes: int | Literal["auto"] = Field(
        default="auto",
        description="Draft tokens per tree, 1 to 255, excluding the root. `auto` means that a "
        "cost model chooses the number in each step, up to `max_nodes`, and 0 when drafting would "
        "not help; for a static tree it means 80, or the size of the given tree.",
    )
    max_nodes: int = Field(
        default=PAPER_DRAFT_TOKENS,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="The largest number of draft tokens that `nodes=auto` may choose, and for "
        "which the engine reserves KV slots. vLLM's `num_speculative_tokens` sets it too, and so "
        "does SGLang's `--speculative-num-draft-tokens`, which counts the root.",
    )
    k: int = Field(
        default=CANDIDATES,
        ge=1,
        le=CANDIDATES,
        description="Candidates kept for each token. Values below 8 are for static trees only.",
    )
    prime: bool = Field(
        default=True,
        description="Start with the target's own predictions after each single token. They are "
        "computed once for a model, when the engine starts and while it has no request, and kept "
        "in the user's cache folder.",
    )
    prime_seconds: float = Field(
        default=1.0,
        ge=0,
        description="How long to compute these predictions when the engine starts, the most "
        "frequent tokens first; the others follow while no request is running. With 0 all of them "
        "do.",
    )
    hot_start: bool | Path = Field(
        default=True,
        description="Keep what was learned from one request to the next. With `false`, everything "
        "is forgotten when a request arrives while no other is running. With the path of a file, "
        "the tables are loaded from it at start if it exists, and saved to it.",
    )
    memory: int = Field(
        default=1 << 20,
        ge=0,
        le=1 << 26,
        description="Tokens of finished answers to remember, for dynamic trees: drafts copy what "
        "followed the same text in them. The oldest leave first. The number is "
        "rounded up to a power of two, and each token takes 28 bytes. 0 means that nothing is "
        "remembered.",
    )
    sharing: Literal["engine", "request"] = Field(
        default="engine",
        description="Whose text a request's candidates come from. `engine`: one set of tables "
        "learns from all requests, and finished answers are remembered. `request`: the primed "
        "tables are only read, nothing is remembered, and each request has a table that learns "
        "from its own text alone, so that no request's text shows in the response time of another.",
    )

    @classmethod
    def apply_num_draft_tokens(cls, given: dict[str, Any], num_draft_tokens: int) -> dict[str, Any]:
        """Apply the engine's count: `max_nodes` for `nodes=auto`, `nodes` for `tree=static`."""
        given = _without_drafting(given)
        tree = given.get("tree", DYNAMIC)
        if tree == STATIC:
            return {"nodes": num_draft_tokens, **given}
        if tree == DYNAMIC and given.get("nodes", "auto") == "auto":
            return {"max_nodes": num_draft_tokens, **given}
        return given

    @field_validator("nodes", mode="before")
    @classmethod
    def _count_or_auto(cls, given: Any) -> Any:
        if given == "auto" or (type(given) is int and 1 <= given <= MAX_DRAFT_TOKENS):
            return given
        raise ValueError(f"use a number from 1 to {MAX_DRAFT_TOKENS}, or 'auto'")

    @model_validator(mode="before")
    @classmethod
    def _take_drafting(cls, given: Any) -> Any:
        return _without_drafting(given) if isinstance(given, dict) else given

    @property
    def is_dynamic(self) -> bool:
        """Whether each request gets its own tree in every step."""
        return self.tree == DYNAMIC

    @cached_property
    def topology(self) -> StaticTree:
        """The static draft tree that these options ask for."""
        if self.tree.startswith(BRANCHING):
            return StaticTree.from_notation(self.tree)
        if self.tree not in (DYNAMIC, STATIC):
            return StaticTree.from_file(Path(self.tree))
        num_draft_tokens = PAPER_DRAFT_TOKENS if self.nodes == "auto" else self.nodes
        if (num_draft_tokens, self.k) == (PAPER_DRAFT_TOKENS, CANDIDATES):
            with as_file(files("recycle_plugin") / "token_recycling_80.json") as file:
                return StaticTree.from_file(file)
        return StaticTree.from_budget(num_draft_tokens, ROW_PRIORS[: self.k])

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if "max_nodes" in self.model_fields_set and not (self.nodes == "auto" and self.is_dynamic):
            raise ValueError(
                f"max_nodes={self.max_nodes} bounds nodes='auto' of dynamic trees: leave it out"
            )
        if self.sharing == "request" and not (self.is_dynamic and self.hot_start is True):
            raise ValueError(
                "sharing='request' keeps nothing of a request and needs dynamic trees: leave "
                "hot_start and tree out"
            )
        if "memory" in self.model_fields_set and self.memory and not self.memory_tokens:
            reason = "sharing='request' keeps nothing of a request"
            if not self.is_dynamic:
                reason = "static trees copy no text"
            raise ValueError(f"memory={self.memory} but {reason}: leave memory out")
        if self.is_dynamic:
            if self.k != CANDIDATES:
                raise ValueError(
                    f"k={self.k} but dynamic trees need {CANDIDATES} candidates per token: leave "
                    "k out, or add tree='static'"
                )
            return self
        tree = self.topology
        if self.nodes not in ("auto", tree.num_draft_tokens):
            raise ValueError(
                f"nodes={self.nodes} but tree={self.tree!r} has {tree.num_draft_tokens} draft "
                "tokens: leave one of them out"
            )
        if tree.width > self.k:
            raise ValueError(
                f"tree={self.tree!r} takes candidate rank {tree.width - 1} but k={self.k} keeps "
                f"ranks 0 to {self.k - 1}: raise k or narrow the tree"
            )
        return self

    @property
    def hot_start_file(self) -> Path | None:
        """The file that `hot_start` names, without symbolic links; None if it names none."""
        given = self.hot_start
        return Path(os.path.realpath(given)) if isinstance(given, Path) else None

    @property
    def memory_tokens(self) -> int:
        """Tokens of finished answers to remember."""
        return self.memory if self.is_dynamic and self.sharing == "engine" else 0

    @property
    def num_draft_tokens(self) -> int:
        """Maximum number of draft tokens of a tree, excluding the root."""
        if not self.is_dynamic:
            return self.topology.num_draft_tokens
        return self.max_nodes if self.nodes == "auto" else self.nodes

    @property
    def is_adaptive(self) -> bool:
        """Whether the number of draft tokens may change from step to step."""
        return self.is_dynamic and self.nodes == "auto"

    @property
    def is_limited(self) -> bool:
        """Whether the greatest number of draft tokens was chosen by the user."""
        return not self.is_adaptive or "max_nodes" in self.model_fields_set

    @property
    def depth(self) -> int:
        """Maximum depth of a draft token."""
        return tree_depth(self.num_draft_tokens) if self.is_dynamic else self.topology.depth


def _without_drafting(given: dict[str, Any]) -> dict[str, Any]:
    """Replace `drafting`, the former name of `tree`.

    Raises:
        ValueError: `drafting` has an unknown value, or contradicts `tree`.
    """
    if "drafting" not in given:
        return given
    drafting = given["drafting"]
    if not isinstance(drafting, str) or drafting not in FORMER_DRAFTING:
        raise ValueError(
            f"drafting={drafting!r} is not known: use tree='{DYNAMIC}' or tree='{STATIC}'"
        )
    former = FORMER_DRAFTING[drafting]
    rest = {name: value for name, value in given.items() if name != "drafting"}
    if drafting == "grown" and rest.get("tree", DYNAMIC) != DYNAMIC:
        raise ValueError(
            f"tree={rest['tree']!r} is static but drafting='grown': leave drafting out"
        )
    former.warn(logger)
    return {"tree": former.instead.removeprefix("tree="), **rest}
