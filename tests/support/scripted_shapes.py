"""Tree shapes that follow a script in place of times, so that each is used whatever it costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

VARIABLE = "TESTS_SCRIPTED_SHAPES"

ENVIRONMENT = {VARIABLE: "1"}

SCRIPT = (11, 0, 0, 3, 6, 1, 0, 0, 0, 9, 5, 2, *([0] * 18))
"""Indices of shapes, counted round; 0 is no drafts."""


def enable() -> None:
    """Let the shapes of an engine's process follow the script."""
    from drafttree.budget.planner_state import ShapePlan, StepPlan
    from drafttree.budget.shape_planner import ShapePlanner
    from drafttree.budget.tree_choice import TreeChoice

    script = cycle(SCRIPT)

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

    ShapePlanner.choose = choose  # type: ignore[method-assign]
