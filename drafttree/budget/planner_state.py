"""What the planner keeps from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from drafttree.arrays import FloatArray, LongArray
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.tree_choice import TreeChoice
from drafttree.tree_shape import TreeShape

_SMOOTHING = 1 / 32
"""Weight of the last step in an outlook."""


class Outlook(NamedTuple):
    """What a step is expected to give.

    Attributes:
        tokens: Tokens of a request, bonus token included.
        seconds: Duration of the step, with the time of looking up drafts.
    """

    tokens: float
    seconds: float


@dataclass
class BucketState:
    """The planner's state for one batch bucket.

    Attributes:
        index: Index of the size in use, trials aside; 0 for plain decoding.
        gain: Harmonic mean over the requests of the tokens expected at that size. Dividing the
            time of a step by it gives the mean time per token.
        draft_seconds: Usual time of looking up drafts; 0 until it is measured.
        benefit: Mean saving of looking up drafts, in plain steps.
        is_tried: Whether the last step was a trial of plain decoding.
        outlook: Mean of what was expected of the last steps, trials aside; None before the first.
    """

    index: int = 0
    gain: float = 1.0
    draft_seconds: float = 0.0
    benefit: float = 0.0
    is_tried: bool = False
    outlook: Outlook | None = None

    def expect(self, tokens: float, seconds: float) -> None:
        """Follow what is expected of steps; see `Outlook`."""
        last = self.outlook or Outlook(tokens, seconds)
        self.outlook = Outlook(
            last.tokens + _SMOOTHING * (tokens - last.tokens),
            last.seconds + _SMOOTHING * (seconds - last.seconds),
        )

    def learn_draft_seconds(
        self, draft_seconds: float, plain_seconds: float, constants: BudgetConstants
    ) -> None:
        """Follow the usual time of looking up drafts; the first lookups may compile something."""
        usual = self.draft_seconds
        if usual == 0:
            self.draft_seconds = min(draft_seconds, constants.smoothing * plain_seconds)
            return
        bounded = min(draft_seconds, constants.max_draft_ratio * usual)
        self.draft_seconds += constants.smoothing * (bounded - usual)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The decision for the current step.

    Attributes:
        choice: The trees.
        expected: Mean tokens of a request that the drafter expects.
        calibrated: The same after acceptance calibration.
        gain: Harmonic mean of the calibrated tokens over the requests.
        lowest: Calibrated tokens of the request that gains least, which may delay the batch.
        is_trial: Whether the step is taken only to measure its size.
        is_wasted: Whether drafts were looked up and are not used.
        levels: `[R]`, how certain the drafts of each request are; see `certainty`.
        counts: `[C]`, numbers of draft tokens, ascending from 0.
        drafts: `[R, C]`, draft tokens of each request that the drafter expects to be accepted of
            that many; None if they are not known.
    """

    choice: TreeChoice
    expected: float = 1.0
    calibrated: float = 1.0
    gain: float = 1.0
    lowest: float = 1.0
    is_trial: bool = False
    is_wasted: bool = False
    levels: LongArray = field(default_factory=lambda: np.zeros(1, np.int64), repr=False)
    counts: FloatArray = field(default_factory=lambda: np.zeros(1), repr=False)
    drafts: FloatArray | None = field(default=None, repr=False)

    def expected_drafts(self, draft_tokens: FloatArray) -> FloatArray:
        """Draft tokens that were expected to be accepted of those that were verified.

        Args:
            draft_tokens: `[B]`, draft tokens of each request that were verified.
        """
        if self.drafts is None:
            return np.full(len(draft_tokens), self.expected - 1)
        drafts = self.drafts
        if len(drafts) != len(draft_tokens):  # those of an earlier step
            drafts = np.broadcast_to(drafts.mean(0), (len(draft_tokens), drafts.shape[1]))
        right = np.searchsorted(self.counts, draft_tokens).clip(0, len(self.counts) - 1)
        left = np.maximum(right - 1, 0)
        between = np.maximum(self.counts[right] - self.counts[left], 1)
        weight = (draft_tokens - self.counts[left]) / between
        requests = np.arange(len(drafts))
        lower, upper = drafts[requests, left], drafts[requests, right]
        expected: FloatArray = lower + weight * (upper - lower)
        return expected


@dataclass(frozen=True, eq=False)
class ShapePlan:
    """The decision of the planner of shapes for one step.

    Attributes:
        shape: The shape of the trees; one without levels for no drafts.
        index: Its index among those to choose from.
        step: What is expected of the step.
        at_stake: What the step loses if nothing is accepted, in tokens of a request, if it
            explores; None if it does not.
        gains: `[S]`, tokens that a request is expected to emit with each shape; None if the choice
            did not depend on them.
        seconds: `[S]`, predicted duration of a step with each shape; None if the choice did not
            depend on it.
    """

    shape: TreeShape
    index: int
    step: StepPlan
    at_stake: float | None = None
    gains: FloatArray | None = None
    seconds: FloatArray | None = None
