"""What the device reports with a step's outputs, for the scheduler to choose later steps' tiers.

The report is one small tensor: for each request and each tier, the tokens that the request's tree
was expected to emit when it was drafted, if it were cut to that tier. Nodes are ordered by score,
so that is one sum of the best scores for each tier, computed where the trees are drafted, kept by
the request's row beside the tree, and copied to the host with the tokens that came of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from drafttree.transfer import AsyncHostCopy
from drafttree.vllm import patches


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


class TierReports:
    """Makes the reports of a model runner.

    Args:
        sizes: The tiers; none if the scheduler chooses none, and then there are no reports.

    Attributes:
        forward_seconds: Seconds of a forward by its number of tokens; until they are known there
            are no reports either.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.forward_seconds: Mapping[int, float] = {}
        self._expected: AsyncHostCopy | None = None

    def begin(self, expected: torch.Tensor, rows: torch.Tensor) -> None:
        """Start to copy what the trees of a step are worth; the host does not wait.

        Args:
            expected: `float32 [requests, S]`.
            rows: `int64 [B]`, the rows of the step's requests.
        """
        if self.sizes and self.forward_seconds:
            self._expected = AsyncHostCopy.of(expected[rows])

    def attach(self, output: Any) -> Any:
        """The output of the step, with the report once it has arrived."""
        copy, self._expected = self._expected, None
        if copy is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _Reporting(output, self, copy)
        return self.attached(output, copy)

    def attached(self, output: ModelRunnerOutput, copy: AsyncHostCopy) -> ModelRunnerOutput:
        """Attach the report to an output that has arrived."""
        report = TierReport(self.sizes, self.forward_seconds, copy.wait().numpy())
        patches.attach_report(output, report)
        return output


class _Reporting(AsyncModelRunnerOutput):
    """An output that arrives later, and then has a report."""

    def __init__(
        self, output: AsyncModelRunnerOutput, reports: TierReports, copy: AsyncHostCopy
    ) -> None:
        self._output = output
        self._reports = reports
        self._copy = copy

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the output and its report."""
        return self._reports.attached(self._output.get_output(), self._copy)
