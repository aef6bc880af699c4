"""A shape budget that chooses given shapes in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import torch

from drafttree.budget import ShapeBudget, TreeShape


class ScriptedBudget(ShapeBudget):
    """Chooses given shapes in turn, counted round."""

    shapes: Iterator[TreeShape]

    @classmethod
    def of(cls, *shapes: TreeShape) -> ScriptedBudget:
        """A budget that chooses these."""
        budget = cls.from_forwards([TreeShape(1, 1, 1)], {1: 0.01})
        budget.shapes = cycle(shapes)
        return budget

    def choose(
        self,
        slots: torch.Tensor,
        unread: Callable[[], float] = lambda: 0.0,
        *,
        drafted: int | None = None,
    ) -> TreeShape:
        """The next one."""
        return next(self.shapes)
