"""The options of Lyanna."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from drafttree.tree import MAX_DEPTH, MAX_DRAFT_TOKENS
from drafttree.tree_shape import TreeShape
from recycle_plugin.config import RecycleOptions
from recycle_plugin.sharing import SharingOptions, parse_tables

LARGEST = 12
"""Draft tokens of the paper's regular trees, and most of `nodes=auto`."""

_OF_SECOND_TREES = ("resample", "resample_nodes", "resample_min_steps", "fusion")


class LyannaOptions(SharingOptions):
    """The options of Lyanna. The paper's runs are those of `nodes=12` and `head=whole`."""

    planned_by: ClassVar[str] = "nodes"

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
    nodes: int | Literal["auto"] = Field(
        default="auto",
        description="Draft tokens of the regular tree, from `steps` to 255, excluding the root; "
        "it has at most `width + (steps - 1) * width**2`, 36 with the defaults. `auto`: a "
        "cost model chooses up to 12, and up to `steps` levels, from step to step, and no drafts "
        "when drafting would not help, on a CPU and with vLLM's V2 model runner; elsewhere it is "
        "12. There are no second trees with it. With `tables`, on a CPU alone, it may also choose "
        "the tables' candidates without the layer, as many as Token Recycling's own `nodes=auto`.",
    )
    resample: bool = Field(
        default=True,
        description="Draft a second tree from the logits that remain after a rejection "
        "(algorithm 2 of the paper). Only where `nodes` is a number, as all options of second "
        "trees.",
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
    head: Literal["whole", "hot"] = Field(
        default="hot",
        description="Which tokens are drafted. `hot`: the drafter's frequent tokens alone, by a "
        "copy of their part of the target's output head, which takes less time. `whole`: all.",
    )
    fusion: bool = Field(
        default=True,
        description="Verify both trees together, with common paths merged. With `false` the "
        "second tree is verified alone, before the next regular one.",
    )
    tables: bool | RecycleOptions = Field(
        default=False,
        description="Draft the candidates of Token Recycling too, from its tables and from copies, "
        "in the same trees. Those nodes are verified that are accepted most often, as many as "
        "without. `true`, or an object of Token Recycling's options: `hot_start`, `memory`, "
        "`prime`, `prime_seconds`, `sharing`, and with `nodes=auto` `max_nodes`. In SGLang, and in "
        "vLLM on the V1 model runner.",
    )

    @field_validator("tables", mode="before")
    @classmethod
    def _parse_tables(cls, given: Any) -> Any:
        return parse_tables(given, ["nodes"], "Lyanna's nodes decides")

    @field_validator("nodes")
    @classmethod
    def _is_in_range(cls, nodes: int | str) -> int | str:
        if isinstance(nodes, int) and not 1 <= nodes <= MAX_DRAFT_TOKENS:
            raise ValueError(f"use 1 to {MAX_DRAFT_TOKENS}, or auto")
        return nodes

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_draft_tokens > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"nodes={self.nodes} and resample_nodes={self.resample_nodes} are more than "
                f"{MAX_DRAFT_TOKENS} together: choose fewer, or fusion=false"
            )
        given = [name for name in _OF_SECOND_TREES if name in self.model_fields_set]
        if self.auto and self.resample and given:
            name, value = given[0], json.dumps(getattr(self, given[0]))
            raise ValueError(
                f"{name}={value} is about second trees, which nodes=auto, the default, does not "
                f"draft: give a number of nodes too, or leave {name} out"
            )
        tables = self.tables
        bounds_tables = (
            isinstance(tables, RecycleOptions) and "max_nodes" in tables.model_fields_set
        )
        if bounds_tables and not self.auto:
            raise ValueError(
                "max_nodes bounds the trees that the tables draft alone, which nodes=auto may "
                f"choose, but nodes={self.nodes}: leave it out of tables, or choose nodes=auto"
            )
        if self.tables and self.resample and not self.fusion:
            raise ValueError(
                "fusion=false verifies second trees alone, but with tables there is one tree: "
                "leave fusion out, or add resample=false"
            )
        if self.regular_nodes < self.steps:
            nodes = f"nodes=auto, up to {LARGEST}," if self.auto else f"nodes={self.nodes}"
            raise ValueError(
                f"{nodes} are fewer than steps={self.steps}: a tree of that depth has at least one "
                "node per step"
            )
        return self

    @property
    def regular_nodes(self) -> int:
        """Maximum number of draft tokens of a regular tree, as `nodes` declares it."""
        return LARGEST if self.nodes == "auto" else self.nodes

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """What `nodes=auto` chooses from; nothing for a fixed number.

        They are chains and wider trees. With tables, whose nodes fill a tree, they differ in the
        layer's steps, with as many draft tokens for each.
        """
        if not self.auto:
            return ()
        steps, width, most = self.steps, self.width, self.regular_draft_tokens
        if self.tables:
            return tuple(
                TreeShape(depth, width, LARGEST * depth // steps) for depth in range(1, steps + 1)
            )
        chains = [TreeShape(depth, 1, depth) for depth in range(1, steps + 1)]
        wider = [
            TreeShape(steps, min(width, 2), 2 * steps),
            TreeShape(steps, width, 3 * steps),
            TreeShape(steps, width, most),
        ]
        of_sizes = {shape.nodes: shape for shape in (*wider, *chains) if shape.nodes <= most}
        return tuple(of_sizes[nodes] for nodes in sorted(of_sizes))

    @property
    def regular_draft_tokens(self) -> int:
        """Maximum number of draft tokens of a regular tree."""
        return self._draft_tokens(self.steps, self.regular_nodes)

    def second_draft_tokens(self, steps: int) -> int:
        """Maximum number of draft tokens of a second tree for which `steps` steps remain."""
        if not self.resample or self.auto or steps <= self.resample_min_steps:
            return 0
        return self._draft_tokens(steps, self.resample_nodes)

    def _draft_tokens(self, depth: int, limit: int) -> int:
        """Number of draft tokens of a tree of this depth before pruning, at most `limit`."""
        return min(limit, self.width + (depth - 1) * self.width**2) if depth else 0

    @property
    def num_draft_tokens(self) -> int:
        """Maximum number of draft tokens that are verified together, excluding the root."""
        if self.tables_alone is not None:
            return max(LARGEST, self.tables_alone.num_draft_tokens)
        regular, second = self.regular_draft_tokens, self.second_draft_tokens(self.steps - 1)
        return regular + second if self.fusion else max(regular, second)

    @property
    def depth(self) -> int:
        """Maximum depth of a draft token."""
        of_tables = self.of_tables
        return self.steps if of_tables is None else max(self.steps, of_tables.depth)
