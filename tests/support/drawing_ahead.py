"""On a CPU, an engine that draws for all rows before any draft is accepted, as on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

VARIABLE = "TESTS_DRAWING_AHEAD"

ENVIRONMENT = {VARIABLE: "1"}

DRAWN = "tokens were drawn ahead"
"""In the log of an engine that did."""


def draw_so(engine: str) -> None:
    """Let this process's engine draw so where it can."""
    sampling = importlib.import_module(f"drafttree.{engine}.sampling")
    sampling.draws_ahead = lambda logits: True  # type: ignore[attr-defined]
    draw = sampling.draw_ahead

    def draw_and_say(*args: Any) -> Any:
        print(DRAWN, flush=True)
        return draw(*args)

    sampling.draw_ahead = draw_and_say  # type: ignore[attr-defined]
