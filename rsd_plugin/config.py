"""The options of RSD."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from drafttree.tree import BRANCHING, MAX_DEPTH, MAX_DRAFT_TOKENS, StaticTree
from drafttree.tree_shape import TreeShape
from recycle_plugin.config import RecycleOptions
from recycle_plugin.sharing import SharingOptions, parse_tables

_BEAM = re.compile(r"beam:(\d+)x(\d+)")
_LARGEST = "beam:3x5"

_BEAMS = tuple(
    TreeShape(depth, width, depth * width)
    for width, depth in (
        *((1, 1), (1, 2), (1, 3), (1, 4), (1, 5)),
        *((2, 3), (2, 4), (3, 3), (2, 5), (3, 4), (3, 5)),
    )
)

_OF_TABLES = 8
"""How many draft tokens more a tree has with tables, by default."""


@dataclass(frozen=True)
class Shape:
    """The levels of the sampled trees.

    Attributes:
        widths: Maximum number of nodes at each level below the root.
        factors: For RSD-C, the number of children of every node in the level above; None for
            RSD-S, whose levels are beams.
    """

    widths: tuple[int, ...]
    factors: tuple[int, ...] | None


class RsdOptions(SharingOptions):
    """The options of RSD."""

    planned_by: ClassVar[str] = "tree"

    model: str = Field(
        description="The draft model, with the target's vocabulary: a folder in Hugging Face's "
        "layout, or a name on the Hub. In SGLang it is given by `--speculative-draft-model-path`."
    )
    tree: str = Field(
        default=_LARGEST,
        description="The shape of draft trees. `beam:WxL` keeps the W best nodes at each of L "
        "levels (RSD-S in the paper). `branch:b0-b1-...` samples b0 children of the root, b1 "
        "children of each of those, and so on (RSD-C). `beam:1xL` and `branch:1-...-1` are "
        "speculative sampling with a chain of L draft tokens. `auto`: a cost model chooses a beam "
        "of up to 3x5 from step to step, and no drafts when drafting would not help, on a CPU and "
        "with vLLM's V2 model runner; elsewhere it is `beam:3x5`. With `tables`, on a CPU alone, "
        "it may also choose the tables' candidates without the draft model, as many as Token "
        "Recycling's own `nodes=auto`.",
    )
    verify: Literal["recursive", "traversal"] = Field(
        default="recursive",
        description="How trees are verified; both leave the target's distribution. `recursive`: "
        "recursive rejection sampling from the root down (the paper's rule). `traversal`: from the "
        "leaves to the root (arXiv 2505.12398), which accepts more where tokens are sampled at a "
        "high temperature, and reads the target's distributions after all nodes in place of those "
        "on the accepted path.",
    )
    head: int | Literal["whole"] = Field(
        default="whole",
        description="Which tokens are drafted. `whole`: all. A number: so many, the most frequent "
        "ones by the order of the tokenizer's merges or by its scores. Of the draft model's output "
        "head only a copy of their rows is multiplied.",
    )
    tables: bool | RecycleOptions = Field(
        default=False,
        description="Draft the candidates of Token Recycling too, from its tables and from copies, "
        "in the same trees, which have 8 draft tokens more. `true`, or an object: `nodes`, how "
        "many they have more, and Token Recycling's options `hot_start`, `memory`, `prime`, "
        "`prime_seconds` and `sharing`. With `tree=auto` trees have as many of the tables' draft "
        "tokens as of the draft model's, up to 8, and `max_nodes` takes the place of `nodes`. In "
        "SGLang, and in vLLM on the V1 model runner.",
    )

    @field_validator("tables", mode="before")
    @classmethod
    def _parse_tables(cls, given: Any, info: ValidationInfo) -> Any:
        if info.data.get("tree") == "auto":
            return parse_tables(given, ["nodes"], "tree=auto decides")
        given = {} if given is True else given
        if isinstance(given, dict):
            given = {"nodes": _OF_TABLES, **given}
        parsed = parse_tables(given, ["max_nodes"], "RSD's tree decides")
        if isinstance(parsed, RecycleOptions) and parsed.nodes == "auto":
            raise ValueError("nodes=auto chooses among trees of tables alone: use a number")
        return parsed

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """What `tree=auto` chooses from; nothing with other trees."""
        if self.tables_alone is None:
            return _BEAMS if self.auto else ()
        return tuple(
            replace(beam, nodes=beam.nodes + min(beam.nodes, _OF_TABLES)) for beam in _BEAMS
        )

    @cached_property
    def shape(self) -> Shape:
        """The levels of the trees, as `tree` declares them; of the largest ones for `auto`."""
        if self.tree.startswith(BRANCHING):
            tree = StaticTree.from_notation(self.tree)
            widths = tuple(end - start for start, end in pairwise(tree.level_ends))
            factors = tuple(width // above for above, width in pairwise((1, *widths)))
            return Shape(widths, factors)
        found = _BEAM.fullmatch(_LARGEST if self.auto else self.tree)
        if found is None:
            raise ValueError(
                f"tree={self.tree!r} is not known: write beam:3x5 (width x length), "
                f"{BRANCHING}3-2-1 (children at each level) or auto"
            )
        width, length = int(found[1]), int(found[2])
        if not (width >= 1 and 1 <= length <= MAX_DEPTH and width * length <= MAX_DRAFT_TOKENS):
            raise ValueError(
                f"tree={self.tree!r} is out of range: use a width of 1 or more, 1 to {MAX_DEPTH} "
                f"levels and at most {MAX_DRAFT_TOKENS} draft tokens"
            )
        return Shape((width,) * length, None)

    @model_validator(mode="after")
    def _has_a_shape(self) -> Self:
        most = max(self.shape.factors or self.shape.widths)
        if isinstance(self.head, int) and self.head < most:
            raise ValueError(
                f"head={self.head}, but a node of tree={self.tree!r} has up to {most} children: "
                f"choose {most} tokens or more"
            )
        return self

    @model_validator(mode="after")
    def _tables_fit(self) -> Self:
        if not isinstance(self.tables, RecycleOptions):
            return self
        if self.verify != "recursive":
            raise ValueError(
                f"verify={self.verify} verifies trees that are sampled as a whole: leave verify "
                "out, or tables"
            )
        if self.num_draft_tokens > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"tree={self.tree!r} and the nodes={self.tables.nodes} of tables are more than "
                f"{MAX_DRAFT_TOKENS} draft tokens together: choose fewer"
            )
        return self

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens of a tree, excluding the root."""
        if self.tables_alone is not None:
            return max(self.shapes[-1].nodes, self.tables_alone.num_draft_tokens)
        sampled = sum(self.shape.widths)
        if isinstance(self.tables, RecycleOptions):
            return sampled + self.tables.num_draft_tokens
        return sampled

    @property
    def draft_forwards(self) -> int | None:
        """One for each level that the draft model drafts; not known where trees are planned."""
        return None if self.auto else len(self.shape.widths)

    @property
    def depth(self) -> int:
        """Maximum depth of a draft token."""
        of_tables, sampled = self.of_tables, len(self.shape.widths)
        if of_tables is None:
            return sampled
        return max(sampled, min(of_tables.depth, self.num_draft_tokens))
