"""Tree shapes that follow a script in place of times, so that each is used whatever it costs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import cycle
from statistics import mean
from typing import Any

VARIABLE = "TESTS_SCRIPTED_SHAPES"

ENVIRONMENT = {VARIABLE: "1"}

SCRIPT = (11, 0, 0, 3, 6, 1, 0, 0, 0, 9, 5, 2, *([0] * 18))
"""Indices of shapes, counted round; 0 is none, or those of the planner of trees without a model."""

SIZES = (7, 0, 31, 3, 15)
"""Draft tokens of trees without a model, counted round, where such a planner decides."""


EMITTED = "Draft tokens and emitted tokens of a step:"


def emitted(log: str) -> dict[int, float]:
    """Mean tokens of a request in a step, by the draft tokens of the step's shape."""
    by_shape = defaultdict(list)
    for nodes, tokens in re.findall(rf"{EMITTED} (\d+) (\S+)", log):
        by_shape[int(nodes)].append(float(tokens))
    return {nodes: mean(tokens) for nodes, tokens in by_shape.items()}


WITH_MODEL, WITHOUT_MODEL, PLAIN = "drafts of the model", "drafts without the model", "no drafts"


def kinds(log: str) -> Counter[str]:
    """How many steps of each kind there were."""
    found = re.findall(rf"{EMITTED} (\d+) \S+ (\w+)", log)
    return Counter(
        PLAIN if drafted == "False" else WITH_MODEL if int(nodes) else WITHOUT_MODEL
        for nodes, drafted in found
    )


def enable() -> None:
    """Let the shapes of an engine's process follow the script, and print what they give."""
    from drafttree import deferred_rows
    from drafttree.arrays import FloatArray
    from drafttree.budget.planner import Planner
    from drafttree.budget.planner_state import ShapePlan, StepPlan
    from drafttree.budget.shape_planner import ShapePlanner
    from drafttree.budget.step_report import MeasuredStep
    from drafttree.budget.tree_choice import TreeChoice

    # The script has no more steps without drafts in a row than a layer usually waits to read them.
    deferred_rows._STEPS = 16
    script, sizes, last = cycle(SCRIPT), cycle(SIZES), -1
    record_step = ShapePlanner.record_step

    def choose(
        self: ShapePlanner,
        batch_size: int,
        catch_up: Callable[[], float],
        *,
        drafted: int | None = None,
        most: int | None = None,
        may_try: bool = True,
        learn: Callable[[], None] = lambda: None,
    ) -> ShapePlan:
        nonlocal last
        assert catch_up() >= 0
        index = next(script) % len(self.shapes)
        if index != last:  # a planner that keeps a decision does not call it
            learn()
        last = index
        if most is not None and self.shapes[index].nodes > most:
            index = 0
        return self._planned(index, StepPlan(TreeChoice(self.shapes[index].nodes)))

    def choose_best_first(
        self: Planner, batch_size: int, scores: FloatArray, *, extends: bool = True
    ) -> TreeChoice:
        return TreeChoice(min(next(sizes), self.candidate_sizes[-1]))

    def record(
        self: ShapePlanner, plan: ShapePlan, batch: int, rows: int, *step: Any
    ) -> MeasuredStep:
        measured = record_step(self, plan, batch, rows, *step)
        emitted = measured.emitted_tokens / batch
        print(EMITTED, plan.shape.nodes, emitted, rows > batch, flush=True)
        return measured

    ShapePlanner.choose = choose  # type: ignore[method-assign]
    ShapePlanner.record_step = record  # type: ignore[method-assign]
    Planner.should_skip_drafting = lambda *_: False  # type: ignore[method-assign]
    Planner.choose_best_first = choose_best_first  # type: ignore[method-assign]
