"""Lets the scheduler that chooses tiers believe in steps whose times are given by their rows.

In Triton's interpreter a step's time says nothing of a GPU, and varies. A model's drafts take 1 ms.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

VARIABLE = "TESTS_STEADY_STEPS"
"""Environment variable: seconds of a row, where a step takes 10 ms besides."""

SCHEDULER = "The scheduler is"
CHOSEN = "The next step's draft tokens:"


def environment(by_row: float) -> dict[str, str]:
    """Environment of an engine's process in which each row takes so many seconds."""
    return {VARIABLE: str(by_row)}


def enable() -> None:
    """Replace what is measured, and print what is chosen."""
    from drafttree.budget.shape_controller import ShapeController
    from drafttree.budget.tier_controller import TierController, TierOutcome, TierPlan
    from drafttree.vllm.v2 import runner, scheduler

    by_row = float(os.environ[VARIABLE])
    record, choose = TierController.record, TierController.choose
    record_shape = ShapeController.record
    make_scheduler = scheduler.make_scheduler

    def named(**kwargs: Any) -> Any:
        made = make_scheduler(**kwargs)
        print(SCHEDULER, type(made).__name__)
        return made

    def steady(self: TierController, outcome: TierOutcome) -> None:
        if outcome.seconds is not None:
            outcome = replace(outcome, seconds=0.01 + by_row * outcome.rows)
        record(self, outcome)

    def steady_shape(self: ShapeController, outcome: TierOutcome) -> None:
        if outcome.seconds is not None and outcome.drafts is not None:
            drafts = replace(outcome.drafts, seconds=0.001, read_seconds=0.0)
            outcome = replace(outcome, seconds=0.011 + by_row * outcome.rows, drafts=drafts)
        record_shape(self, outcome)

    def printed(self: TierController, requests: list[str], most: int) -> TierPlan:
        plan = choose(self, requests, most)
        print(CHOSEN, plan.size, "of at most", most, "for", len(requests))
        return plan

    TierController.record = steady  # type: ignore[method-assign]
    ShapeController.record = steady_shape  # type: ignore[method-assign]
    TierController.choose = printed  # type: ignore[method-assign,assignment]
    scheduler.make_scheduler = named  # type: ignore[assignment]
    runner.forward_seconds_by_rows = lambda runner, max_rows: {  # type: ignore[attr-defined]
        rows: 0.01 + by_row * rows for rows in (1, 16, 256)
    }
