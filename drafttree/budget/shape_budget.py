"""What a drafter with a model uses to choose the shape of each step's trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Self

import numpy as np
import torch

from drafttree.budget.level_acceptance import are_whole
from drafttree.budget.node_budget import NodeBudget
from drafttree.budget.planner_state import ShapePlan
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.budget.step_timer import StepOutcome, StepTimer
from drafttree.budget.tree_choice import TreeChoice
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape

_MOST_UNRECORDED = 16
"""Entries of the queue after which the planner learns them even if it makes no decision."""


class ShapeBudget:
    """Chooses the shape of each step's trees, and measures steps to choose better.

    In each step call `choose`, then `drafted` if anything was drafted, then `verified`. All tensors
    are on the host.

    Attributes:
        planner: The planner that decides.
    """

    def __init__(
        self,
        planner: ShapePlanner,
        clock: Callable[[], float] = perf_counter,
        *,
        pads_trees: bool = False,
    ) -> None:
        self.planner = planner
        self._timer = StepTimer(clock, pads_trees=pads_trees)
        self._plan: ShapePlan | None = None
        self._trees: DraftTree | None = None
        # Queued calls that tell the planner of outcomes. Those between two decisions are made
        # together: one by one, each after a forward that has filled the processor's caches, they
        # take several times as long.
        self._unrecorded: list[Callable[[], object]] = []

    @classmethod
    def from_forwards(
        cls,
        shapes: Sequence[TreeShape],
        forward_seconds: Mapping[int, float],
        clock: Callable[[], float] = perf_counter,
        base: NodeBudget | None = None,
        *,
        pads_trees: bool = False,
    ) -> Self:
        """Plan from the measured costs of the target's forwards.

        Args:
            shapes: Shapes with drafts, by number of draft tokens, no two with the same number.
            forward_seconds: Seconds of a forward by the number of its tokens.
            clock: Returns the time in seconds.
            base: Chooses how many drafts that need no model are verified in the steps without the
                model's; None if there are no such drafts.
            pads_trees: Whether a step verifies as many rows of each request as of the largest tree.

        Raises:
            ValueError: The shapes do not ascend, or `forward_seconds` is empty or not positive.
        """
        planner = ShapePlanner(
            shapes,
            forward_seconds,
            base=None if base is None else base.planner,
            pads_trees=pads_trees,
        )
        return cls(planner, clock, pads_trees=pads_trees)

    def choose(
        self,
        slots: torch.Tensor,
        catch_up_seconds: Callable[[], float] = lambda: 0.0,
        *,
        drafted: int | None = None,
    ) -> TreeShape:
        """Choose the shape of the next step's trees; called when the step before has ended.

        Args:
            slots: `int64 [B]`, slots of the requests.
            catch_up_seconds: What the model would need to read before it can draft. Asked for
                only if drafts are considered.
            drafted: For how many requests there may be drafts; None for all.
        """
        step = self._timer.lap(slots)
        if step is not None and self._plan is not None:
            self._unrecorded.append(partial(self._record_step, self._plan, step, self._trees))
        self._trees = None
        if len(self._unrecorded) >= _MOST_UNRECORDED:
            self._learn()
        self._plan = self.planner.choose(
            len(slots), catch_up_seconds, drafted=drafted, learn=self._learn
        )
        self._timer.begin(slots, TreeChoice(self._plan.shape.nodes))
        return self._plan.shape

    def drafted(self, seconds: float, catch_up_seconds: float = 0.0) -> None:
        """Note how long drafting took in the step under way.

        Args:
            seconds: Time for the drafts; several calls are added up.
            catch_up_seconds: Further time, for what the model had missed.
        """
        self._timer.drafted(seconds, catch_up_seconds)

    def verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Note the outcome of a step; the trees are those that were verified."""
        if self._plan is not None and self._plan.shape.depth and trees.drafted:
            add = self.planner.acceptance.add
            self._unrecorded.append(partial(add, self._plan.shape, trees, verified))
            self._trees = trees
        self._timer.verified(slots, trees, verified)

    def discard(self) -> None:
        """Discard the pending measurement: a request has ended, and the next may take its slot."""
        self._timer.discard()

    def reset(self) -> None:
        """Forget what was accepted, for instance because the target's weights changed.

        The step under way lasted until they had.
        """
        self._learn()
        self.planner.reset()
        self.discard()

    def explain(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and size; see `StepReport.rows`."""
        self._learn()
        return self.planner.explain()

    def _learn(self) -> None:
        """Let the planner learn from the steps that it has not seen."""
        unrecorded, self._unrecorded = self._unrecorded, []
        for record in unrecorded:
            record()

    def _record_step(self, plan: ShapePlan, step: StepOutcome, trees: DraftTree | None) -> None:
        """Record a measured step.

        Args:
            plan: What was chosen for it.
            step: What was measured.
            trees: The model's trees as verified; None if there were none.
        """
        whole = np.zeros(step.batch_size, np.bool_)
        self.planner.record_step(
            plan,
            step.batch_size,
            step.rows,
            step.seconds,
            step.draft_seconds,
            step.emitted_tokens,
            step.verified,
            whole if trees is None else are_whole(plan.shape, trees),
            step.catch_up_seconds,
        )
