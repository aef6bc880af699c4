"""What the planner keeps from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from drafttree.arrays import BoolArray, FloatArray, LongArray
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.tree_choice import TreeChoice
from drafttree.tree_shape import TreeShape

_SMOOTHING = 1 / 32
"""Weight of the last step in an outlook."""
_READING_SMOOTHING = 1 / 512
"""Weight of the last step in the mean time of reading: a long prompt is read once."""
_READING_DECAY = 1 / 1024
"""What a step without drafts takes off that mean, so that drafting is tried again."""


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
        reading: Mean seconds in which a model reads new texts in a step with its drafts.
    """

    index: int = 0
    gain: float = 1.0
    draft_seconds: float = 0.0
    benefit: float = 0.0
    is_tried: bool = False
    outlook: Outlook | None = None
    reading: float = 0.0

    def expect(self, tokens: float, seconds: float) -> None:
        """Follow what is expected of steps; see `Outlook`."""
        last = self.outlook or Outlook(tokens, seconds)
        self.outlook = Outlook(
            last.tokens + _SMOOTHING * (tokens - last.tokens),
            last.seconds + _SMOOTHING * (seconds - last.seconds),
        )

    def read(self, seconds: float) -> None:
        """Follow what reading takes in steps with a model's drafts."""
        self.reading += _READING_SMOOTHING * (seconds - self.reading)

    def rest(self) -> None:
        """Forget slowly what reading took while nothing is drafted."""
        self.reading *= 1 - _READING_DECAY

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
        proposed: `[R]`, draft tokens of each request; None if they are not known.
        drafts: `[R]`, how many of them the drafter expects to be accepted; None as before.
    """

    choice: TreeChoice
    expected: float = 1.0
    calibrated: float = 1.0
    gain: float = 1.0
    lowest: float = 1.0
    is_trial: bool = False
    is_wasted: bool = False
    levels: LongArray = field(default_factory=lambda: np.zeros(1, np.int64), repr=False)
    proposed: LongArray | None = field(default=None, repr=False)
    drafts: FloatArray | None = field(default=None, repr=False)

    def of_mean(self, count: int) -> tuple[LongArray, FloatArray]:
        """The mean over the requests for `count` requests: how certain their drafts are, and how
        many draft tokens are expected to be accepted."""
        levels = np.full(count, round(float(self.levels.mean())))
        return levels, np.full(count, self.expected - 1)

    def of_whole_trees(self, draft_tokens: LongArray) -> tuple[BoolArray, LongArray, FloatArray]:
        """The requests whose trees were verified whole, and what was expected of them.

        Args:
            draft_tokens: `[B]`, draft tokens of each request that were verified.

        Returns:
            `[B]`, whether a request is one of the W with whole trees; `[W]`, how certain their
            drafts are; `[W]`, draft tokens that were expected to be accepted. Where the scores are
            those of other requests, the mean is expected of all.
        """
        count = len(draft_tokens)
        if self.proposed is None or self.drafts is None or len(self.drafts) != count:
            return np.ones(count, np.bool_), *self.of_mean(count)
        whole = draft_tokens >= self.proposed
        return whole, self.levels[whole], self.drafts[whole]


@dataclass(frozen=True, eq=False)
class ShapePlan:
    """The decision of the planner of shapes for one step.

    Attributes:
        shape: The shape of the trees; one without levels for no drafts.
        index: Its index among those to choose from.
        step: What is expected of the step.
        share: The share of the step's requests that are drafted for; its outcome is judged by it.
        at_stake: What the step loses if nothing is accepted, in tokens of a request, if it
            explores; None if it does not.
        gains: `[S]`, tokens that a request is expected to emit with each shape, in the harmonic
            mean over all requests; None if the choice did not depend on them.
        seconds: `[S]`, predicted duration of a step with each shape; None if the choice did not
            depend on it.
    """

    shape: TreeShape
    index: int
    step: StepPlan
    share: float = 1.0
    at_stake: float | None = None
    gains: FloatArray | None = None
    seconds: FloatArray | None = None
