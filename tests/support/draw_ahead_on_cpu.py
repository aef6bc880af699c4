"""Lets an engine on a CPU draw tokens for all rows in advance, as it does on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

VARIABLE = "TESTS_DRAW_AHEAD_ON_CPU"

ENVIRONMENT = {VARIABLE: "1"}

DRAWN = "tokens were drawn ahead"
"""Line in the log of an engine that drew ahead."""


def enable(engine: str) -> None:
    """Let this process's engine draw ahead where it can."""
    sampling = importlib.import_module(f"drafttree.{engine}.sampling")
    sampling.draws_ahead = lambda logits: True  # type: ignore[attr-defined]
    draw = sampling.draw_ahead

    def draw_and_log(*args: Any) -> Any:
        print(DRAWN, flush=True)
        return draw(*args)

    sampling.draw_ahead = draw_and_log  # type: ignore[attr-defined]
