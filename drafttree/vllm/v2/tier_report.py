"""What the device reports with a step's outputs, for the scheduler to choose later steps' tiers.

The report is one small tensor: for each request and each tier, the tokens that the request's tree
was expected to emit when it was drafted, if it were cut to that tier. Nodes are ordered by score,
so that is one sum of the best scores for each tier, computed where the trees are drafted, kept by
the request's row beside the tree, and copied to the host with the tokens that came of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

_ATTRIBUTE = "drafttree_tiers"
"""Attribute of the engine's output with the report; it travels with it between processes."""


@dataclass(frozen=True)
class TierReport:
    """What arrives at the scheduler with a step's outputs.

    Attributes:
        sizes: The tiers: numbers of draft tokens, ascending from 0.
        forward_seconds: Seconds of a forward by its number of tokens, measured at the start.
        expected: `float32 [B, S]`, see `expected_tokens`, of the trees that the step verified, for
            the requests in the order of the output's `req_ids`; None if it verified none.
    """

    sizes: tuple[int, ...]
    forward_seconds: Mapping[int, float]
    expected: np.ndarray[Any, Any] | None = None

    def attach_to(self, output: ModelRunnerOutput) -> None:
        """Let the report travel with a step's output."""
        setattr(output, _ATTRIBUTE, self)

    @staticmethod
    def of(output: ModelRunnerOutput) -> TierReport | None:
        """The report that came with a step's output."""
        report: TierReport | None = getattr(output, _ATTRIBUTE, None)
        return report


def expected_tokens(
    scores: torch.Tensor, drafted: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """Tokens that each tree is expected to emit at each tier; the host waits for nothing.

    Args:
        scores: `float [B, F]`, the probability that each of F nodes is accepted, the best first and
            without the root; 0 where there is no node. F is the largest tier at least.
        drafted: `bool [B]`, requests whose drafts were looked up.
        sizes: The tiers, ascending from 0.

    Returns:
        `float32 [B, S]`, the bonus token included; NaN for requests that are not drafted.
    """
    sums = scores.float().cumsum(1)
    picked = torch.stack([sums[:, size - 1] for size in sizes if size], 1)
    expected = torch.nn.functional.pad(1 + picked, (1, 0), value=1.0)
    return expected.masked_fill(~drafted[:, None], float("nan"))
