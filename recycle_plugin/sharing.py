"""Methods with a model in whose trees Token Recycling's candidates may stand too: their option
`tables`, and what their drafters have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from drafttree.budget import ShapeBudget, measure_forwards
from drafttree.method import MethodOptions
from drafttree.model_drafters import ModelDrafter
from drafttree.ranks import Group
from drafttree.target import Target
from drafttree.tensor_parallel import is_drafting_rank
from drafttree.tree import DraftTree, Verified
from recycle_plugin import METHOD, DynamicTreeDrafter, RecycleOptions, make_drafter
from recycle_plugin.shared_ranks import TablesOfFirstRank
from recycle_plugin.shared_trees import RankTables, SharedTrees


class SharingOptions(MethodOptions):
    """Options of a method in whose trees the tables' candidates may stand too."""

    planned_by: ClassVar[str]
    """The option that is `auto` where a shape is chosen for each step."""

    if TYPE_CHECKING:
        # Each method declares it, after its other options, with a description of its own.
        tables: bool | RecycleOptions

    @property
    def auto(self) -> bool:
        """Whether a shape is chosen for each step."""
        given: object = getattr(self, self.planned_by)
        return given == "auto"

    @property
    def tables_alone(self) -> RecycleOptions | None:
        """Token Recycling's options for trees that the tables draft alone, in steps for which a
        cost model chooses them; None where they never do."""
        return self.tables if self.auto and isinstance(self.tables, RecycleOptions) else None

    @property
    def of_tables(self) -> RecycleOptions | None:
        """Token Recycling's options, for trees as large as these or as those that the tables draft
        alone; None without tables."""
        if not isinstance(self.tables, RecycleOptions):
            return None
        as_large = {"nodes": self.num_draft_tokens}
        return self.tables_alone or self.tables.model_copy(update=as_large)

    @property
    def shares_worth(self) -> bool:
        """Whether requests share what is learnt of the worth of nodes."""
        return isinstance(self.tables, RecycleOptions) and self.tables.sharing == "engine"

    @property
    def reads_logits(self) -> str | None:
        """The option by which the drafter learns from the target's logits."""
        return "tables" if self.tables else None

    def check_device(self, device: torch.device) -> None:
        """Check that trees can be chosen as the options say.

        Raises:
            ValueError: The tables are to draft alone now and then, but not on a CPU.
        """
        if self.tables_alone is not None and device.type != "cpu":
            name = self.planned_by
            note = "" if name in self.model_fields_set else ", the default,"
            raise ValueError(
                f"{name}=auto{note} with tables chooses by the times of steps, on a CPU only: "
                f"give {name} another value, or leave tables out"
            )


class SharingDrafter(ModelDrafter):
    """A drafter with a model that may plan its trees, and share them with tables.

    Before trees are shared, `max_depth` is that of the model's nodes.
    """

    _options: SharingOptions
    _shared: SharedTrees | None = None
    _budget: ShapeBudget | None = None
    _pads_trees = False

    def share_tables(self, target: Target) -> None:
        """Make the tables that the options ask for, if they do; called before `allocate`."""
        self._pads_trees = target.pads_trees
        options = self._options.of_tables
        if options is not None:
            self.share_trees(make_tables(options, target), target.group)

    def share_trees(self, tables: RankTables, group: Group | None = None) -> None:
        """Let the candidates of Token Recycling's tables share the trees; called before `allocate`.

        Args:
            tables: Its drafter, with the options `of_tables`.
            group: The tensor-parallel ranks; None if there is one.
        """
        options = self._options
        self._shared = SharedTrees(
            tables,
            options.num_draft_tokens,
            self.max_depth,
            self.source,
            learns=options.shares_worth,
            group=group,
        )
        self.tables = tables
        self.max_depth = options.depth
        self.shares_texts = tables.shares_texts

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        """Allocate the tables' state of requests, if there are any."""
        if self._shared is not None:
            self._shared.allocate(max_requests, max_model_len)

    @property
    def plans(self) -> bool:
        """Whether shapes are chosen."""
        return self._options.auto

    def profile(self, measure_forward: Callable[[int], float], max_tokens: int) -> None:
        """If shapes are chosen, measure forwards of the target."""
        if self.plans:
            seconds = measure_forwards(measure_forward, max_tokens)
            alone = None if self._shared is None else self._shared.plan_alone(seconds)
            self._budget = ShapeBudget.from_forwards(
                self._options.shapes, seconds, base=alone, pads_trees=self._pads_trees
            )

    def propose_without_model(self, slots: Tensor, roots: Tensor) -> DraftTree:
        """With tables, the trees that they draft alone, as Token Recycling's `nodes=auto` does."""
        if self._shared is None:
            return super().propose_without_model(slots, roots)
        started = perf_counter()
        trees = self._shared.propose_alone(slots, roots)
        self.drafted(perf_counter() - started)
        return trees

    def drafted(self, seconds: float, read_tokens: int = 0, read_seconds: float = 0.0) -> None:
        """Note the times of a step's drafts."""
        if self._budget is not None:
            self._budget.drafted(seconds, read_seconds)

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        """Note the outcome of a step."""
        if self._shared is not None:
            self._shared.on_verified(slots, trees, verified)
        if self._budget is not None:
            self._budget.verified(slots, trees, verified)

    def release(self, slots: Sequence[int]) -> None:
        """Requests have ended, so that the step under way is no decode step of the same ones."""
        if self._shared is not None:
            self._shared.tables.release(slots)
        if self._budget is not None and slots:
            self._budget.discard()

    def check_remembers(self) -> None:
        """Check that there are tables, and that their memory lasts.

        Raises:
            ValueError: Texts would not be kept.
        """
        if self._shared is None:
            raise ValueError(
                f"{type(self).__name__} remembers no texts without tables: add tables=true"
            )
        self._shared.tables.check_remembers()

    def remember(self, tokens: Tensor) -> None:
        """Let the tables' memory learn texts: int32 `[n]` on the CPU, separated by -1.

        Raises:
            ValueError: There are no tables, or they have no memory.
        """
        if self._shared is None:
            super().remember(tokens)
        else:
            self._shared.tables.remember(tokens)

    def preserved(self) -> AbstractContextManager[None]:
        """A context after which the tables are as before, if there are any."""
        return nullcontext() if self._shared is None else self._shared.tables.preserved()

    def close(self) -> None:
        """Save what the tables have not saved yet."""
        if self._shared is not None:
            self._shared.close()

    def reset(self) -> None:
        """Forget what was accepted, and what the tables have learned."""
        if self._budget is not None:
            self._budget.reset()
        if self._shared is not None:
            self._shared.reset()

    def explain(self) -> list[dict[str, Any]]:
        """How shapes were chosen, by number of draft tokens."""
        return [] if self._budget is None else list(self._budget.explain())

    def acceptance(self) -> dict[str, Any]:
        """With tables, acceptance by who proposed a draft token."""
        return {} if self._shared is None else self._shared.acceptance()

    def sources(self, slots: Tensor, width: int) -> list[list[str]]:
        """Who proposed each node of the trees proposed last."""
        if self._shared is None:
            return super().sources(slots, width)
        return self._shared.sources(slots, width)


def make_tables(options: RecycleOptions, target: Target) -> RankTables:
    """Token Recycling's drafter for shared trees, with the options `of_tables`."""
    if target.group is not None and not is_drafting_rank(target.group):
        return TablesOfFirstRank(options.num_draft_tokens, target.device)
    tables = make_drafter(options, target)
    assert isinstance(tables, DynamicTreeDrafter), "parse_tables allows no others"
    return tables


def parse_tables(given: Any, refused: Sequence[str], because: str) -> Any:
    """The value of a method's option `tables`: False, or Token Recycling's options.

    Args:
        given: True, False, or an object of Token Recycling's options.
        refused: The options that are not used, besides those of static trees.
        because: What decides in their place, for the message.

    Raises:
        ValueError: The message names the option, and the fix.
    """
    if given is False or isinstance(given, RecycleOptions):
        return given
    if given is not True and not isinstance(given, dict):
        raise ValueError("use true, false, or an object of Token Recycling's options")
    chosen = {} if given is True else given
    for name in ("tree", "drafting", "k", *refused):
        if name in chosen:
            raise ValueError(f"{name} is not used, as {because}: leave it out")
    return METHOD.parse(chosen)
