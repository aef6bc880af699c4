"""The options of Lyanna."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from drafttree.method import MethodOptions
from drafttree.tree import MAX_DEPTH, MAX_DRAFT_TOKENS


class LyannaOptions(MethodOptions):
    """The options of Lyanna. The defaults are those of the paper's runs."""

    model: str = Field(
        description="The folder of the drafter, trained for the target. In SGLang it is given by "
        "`--speculative-draft-model-path`."
    )
    steps: int = Field(
        default=3,
        ge=1,
        le=MAX_DEPTH,
        description="Hidden states to draft per step, which is the depth of the tree.",
    )
    width: int = Field(
        default=4,
        ge=1,
        description="Children of a node, and nodes of a level that are expanded further.",
    )
    nodes: int = Field(
        default=12,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="Draft tokens of the regular tree, excluding the root.",
    )
    resample: bool = Field(
        default=True,
        description="Draft a second tree from the logits that remain after a rejection "
        "(algorithm 2 of the paper).",
    )
    resample_nodes: int = Field(
        default=12, ge=1, le=MAX_DRAFT_TOKENS, description="Draft tokens of the second tree."
    )
    resample_min_steps: int = Field(
        default=0,
        ge=0,
        description="A second tree is drafted only if more steps than this remain after the "
        "rejection.",
    )
    table: Literal["model", "float8"] = Field(
        default="model",
        description="The number format of the token info table. `model`: the target's own. "
        "`float8`: 8-bit floats (e4m3), which take less memory.",
    )
    fusion: bool = Field(
        default=True,
        description="Verify both trees together, with common paths merged. With `false` the "
        "second tree is verified alone, before the next regular one.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_draft_tokens > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"nodes={self.nodes} and resample_nodes={self.resample_nodes} are more than "
                f"{MAX_DRAFT_TOKENS} together: choose fewer, or fusion=false"
            )
        if self.nodes < self.steps:
            raise ValueError(
                f"nodes={self.nodes} are fewer than steps={self.steps}: a tree of that depth has "
                "at least one node per step"
            )
        return self

    @property
    def regular_draft_tokens(self) -> int:
        """Maximum number of draft tokens of a regular tree."""
        return self._draft_tokens(self.steps, self.nodes)

    def second_draft_tokens(self, steps: int) -> int:
        """Maximum number of draft tokens of a second tree for which `steps` steps remain."""
        if not self.resample or steps <= self.resample_min_steps:
            return 0
        return self._draft_tokens(steps, self.resample_nodes)

    def _draft_tokens(self, depth: int, limit: int) -> int:
        """Number of draft tokens of a tree of this depth before pruning, at most `limit`."""
        return min(limit, self.width + (depth - 1) * self.width**2) if depth else 0

    @property
    def num_draft_tokens(self) -> int:
        """Maximum number of draft tokens that are verified together, excluding the root."""
        regular, second = self.regular_draft_tokens, self.second_draft_tokens(self.steps - 1)
        return regular + second if self.fusion else max(regular, second)

    @property
    def depth(self) -> int:
        """Maximum depth of a draft token."""
        return self.steps
