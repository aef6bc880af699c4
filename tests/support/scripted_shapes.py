"""Tree shapes that follow a script in place of times, so that each is used whatever it costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

VARIABLE = "TESTS_SCRIPTED_SHAPES"

ENVIRONMENT = {VARIABLE: "1"}

SCRIPT = (11, 0, 0, 3, 6, 1, 0, 0, 0, 9, 5, 2, *([0] * 18))
"""Indices of shapes, counted round; 0 is none, or those of the planner of trees without a model."""

SIZES = (7, 0, 31, 3, 15)
"""Draft tokens of trees without a model, counted round, where such a planner decides."""


def enable() -> None:
    """Let the shapes of an engine's process follow the script."""
    from drafttree.budget.cost_factors import FloatArray
    from drafttree.budget.planner import Planner
    from drafttree.budget.planner_state import ShapePlan, StepPlan
    from drafttree.budget.shape_planner import ShapePlanner
    from drafttree.budget.tree_choice import TreeChoice

    script, sizes = cycle(SCRIPT), cycle(SIZES)

    def choose(
        self: ShapePlanner,
        batch_size: int,
        catch_up: Callable[[], float],
        *,
        most: int | None = None,
        may_try: bool = True,
    ) -> ShapePlan:
        assert catch_up() >= 0
        index = next(script) % len(self.shapes)
        if most is not None and self.shapes[index].nodes > most:
            index = 0
        return self._planned(index, StepPlan(TreeChoice(self.shapes[index].nodes)))

    def choose_best_first(self: Planner, batch_size: int, scores: FloatArray) -> TreeChoice:
        return TreeChoice(min(next(sizes), self.candidate_sizes[-1]))

    ShapePlanner.choose = choose  # type: ignore[method-assign]
    Planner.should_skip_drafting = lambda *_: False  # type: ignore[method-assign]
    Planner.choose_best_first = choose_best_first  # type: ignore[method-assign]
