"""What the device reports with a step's outputs, for the scheduler to choose later steps' tiers.

Of trees that are looked up the report is one small tensor: for each request and each tier, the
tokens that the request's tree was expected to emit when it was drafted, if it were cut to that
tier. Nodes are ordered by score, so that is one sum of the best scores for each tier, computed
where the trees are drafted, kept by the request's row beside the tree, and copied to the host with
the tokens that came of it. Of trees that a model drafts it is what was accepted, and what drafting
took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from drafttree.budget.model_drafts import ModelDrafts
from drafttree.budget.shape_controller import ShapeController
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.budget.tier_controller import TierController
from drafttree.transfer import AsyncHostCopy
from drafttree.tree_shape import TreeShape
from drafttree.vllm import patches
from drafttree.vllm.v2.draft_clock import DraftClock


@dataclass(frozen=True)
class TierReport:
    """What arrives at the scheduler with a step's outputs.

    Attributes:
        sizes: The tiers: numbers of draft tokens, ascending from 0.
        forward_seconds: Seconds of a forward by its number of tokens, measured at the start.
        expected: `float32 [B, S]`, see `Drafter.expected_tokens`, of the trees that the step
            verified, for the requests in the order of the output; NaN without a tree.
    """

    sizes: tuple[int, ...]
    forward_seconds: Mapping[int, float]
    expected: np.ndarray[Any, Any]

    def make_controller(self) -> TierController:
        """What chooses the tiers."""
        return TierController(self.sizes, self.forward_seconds)


@dataclass(frozen=True)
class ShapeReport:
    """What arrives if a model drafts trees in shapes that are chosen.

    Attributes:
        shapes: The shapes, by number of draft tokens.
        forward_seconds: Seconds of a forward of the target by its number of tokens.
        drafts: The step's trees, for the requests in the order of the output.
    """

    shapes: tuple[TreeShape, ...]
    forward_seconds: Mapping[int, float]
    drafts: ModelDrafts

    def make_controller(self) -> ShapeController:
        """What chooses the shapes."""
        # The scheduler knows of no request without drafts, and gives each as many rows.
        return ShapeController(ShapePlanner(self.shapes, self.forward_seconds, pads_trees=True))


class TierReports:
    """Makes the reports of a model runner.

    Args:
        sizes: The tiers; none if the scheduler chooses none, and then there are no reports.
        shapes: The shapes that a model drafts in, if they are chosen; the tiers are their sizes.

    Attributes:
        forward_seconds: Seconds of a forward by its number of tokens; until they are known there
            are no reports either.
    """

    def __init__(self, sizes: Sequence[int], shapes: Sequence[TreeShape] = ()) -> None:
        self.sizes = tuple(sizes)
        self.shapes = tuple(shapes)
        self.forward_seconds: Mapping[int, float] = {}
        self._coming: Callable[[], TierReport | ShapeReport] | None = None

    def begin(self, expected: torch.Tensor, rows: torch.Tensor) -> None:
        """Start to copy what the trees of a step are worth; the host does not wait.

        Args:
            expected: `float32 [requests, S]`.
            rows: `int64 [B]`, the rows of the step's requests.
        """
        if not (self.sizes and self.forward_seconds):
            return
        copy = AsyncHostCopy.of(expected[rows])
        self._coming = lambda: TierReport(self.sizes, self.forward_seconds, copy.wait().numpy())

    def begin_drafts(
        self, parents: torch.Tensor, path: torch.Tensor, clock: DraftClock, unread: int
    ) -> None:
        """Start to copy what came of trees that a model drafted; the host does not wait.

        Args:
            parents: `int32 [B, N]`, see `ModelDrafts`.
            path: `int32 [B, D + 1]`.
            clock: Has measured the step's drafts.
            unread: Tokens that the model has missed.
        """
        if not self.forward_seconds:
            return
        copy, width = AsyncHostCopy.of(torch.cat((parents, path), 1)), parents.shape[1]

        def report() -> ShapeReport:
            values = copy.wait().numpy()
            drafting, reading = clock.seconds()
            drafts = ModelDrafts(
                *(values[:, :width], values[:, width:]),
                *(drafting, clock.read_tokens, reading, unread),
            )
            return ShapeReport(self.shapes, self.forward_seconds, drafts)

        self._coming = report

    def attach(self, output: Any) -> Any:
        """The output of the step, with the report once it has arrived."""
        report, self._coming = self._coming, None
        if report is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _Reporting(output, report)
        patches.attach_report(output, report())
        return output


class _Reporting(AsyncModelRunnerOutput):
    """An output that arrives later, and then has a report."""

    def __init__(
        self, output: AsyncModelRunnerOutput, report: Callable[[], TierReport | ShapeReport]
    ) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the output and its report."""
        output = self._output.get_output()
        patches.attach_report(output, self._report())
        return output
