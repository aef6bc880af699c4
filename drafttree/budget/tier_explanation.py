"""Why tiers were chosen: the last choices, and what came of all steps.

The tier controller decides in one process, and a worker is asked in another. So what there is to
explain travels in small pieces, one with each step that is scheduled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from drafttree.budget.step_report import MeasuredStep, StepReport

RECENT = 64
"""Choices that are kept."""


@dataclass(frozen=True)
class TierChoice:
    """A tier that was chosen, and what the choice followed from.

    Attributes:
        size: Draft tokens of each request.
        reason: `best`; `limit`, the best one for which there is room; `rest`, as plain decoding is
            the best; `probe`, a rest in which drafts are looked up to see whether they would help;
            `explore`, drafts that a model is asked for to see whether they help; or `trial`, to
            measure the tier.
        requests: Number of requests.
        most: Most draft tokens of a request for which there was room.
        gain: Expected tokens per second of a request against plain decoding.
        sizes: The tiers.
        tokens: Tokens that a request was expected to emit at each tier, in the harmonic mean.
        seconds: Expected duration of a step at each tier.
    """

    size: int
    reason: str
    requests: int
    most: int
    gain: float
    sizes: tuple[int, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """The choice as a row of a table, ready for JSON.

        Returns:
            The keys `num_draft_tokens`, `reason`, `requests`, `most`, `gain`, and for each tier
            `tokens_N` and `ms_N`, where N is its number of draft tokens.
        """
        of_sizes: dict[str, float] = {}
        for size, tokens, seconds in zip(self.sizes, self.tokens, self.seconds, strict=True):
            of_sizes[f"tokens_{size}"] = tokens
            of_sizes[f"ms_{size}"] = 1e3 * seconds
        return {
            "num_draft_tokens": self.size,
            "reason": self.reason,
            "requests": self.requests,
            "most": self.most,
            "gain": self.gain,
            **of_sizes,
        }


@dataclass(frozen=True)
class TierUpdate:
    """What is new since the last step that was scheduled.

    Attributes:
        choice: The choice that was made; None if there was nothing to choose.
        steps: Steps whose outcomes have arrived.
    """

    choice: TierChoice | None
    steps: tuple[MeasuredStep, ...]


class TierExplanation:
    """The last choices, and sums over all steps."""

    def __init__(self) -> None:
        self._choices: deque[TierChoice] = deque(maxlen=RECENT)
        self._report = StepReport()

    def add(self, update: TierUpdate) -> None:
        """Add what is new."""
        if update.choice is not None:
            self._choices.append(update.choice)
        for step in update.steps:
            self._report.add(step)

    def rows(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and tier; see `StepReport.rows`."""
        return self._report.rows()

    def choices(self) -> list[dict[str, Any]]:
        """The last choices, the newest at the end; see `TierChoice.row`."""
        return [choice.row() for choice in self._choices]
