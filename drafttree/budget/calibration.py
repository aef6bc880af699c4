"""Acceptance calibration: how many of the draft tokens that a drafter expects are accepted."""

from __future__ import annotations

import numpy as np

from drafttree.arrays import FloatArray
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.decaying_ratio import DecayingRatio


class AcceptanceCalibration:
    """The ratio of accepted to expected draft tokens, by batch bucket and size.

    The estimate is hierarchical: the ratio over all steps is the prior of a batch bucket's ratio,
    which is the prior of the ratio of one size in that bucket. Without new samples all of them
    decay to 1. The bonus token, which a plain step emits as well, is not counted.
    """

    def __init__(self, constants: BudgetConstants) -> None:
        self._constants = constants
        self._overall = DecayingRatio(constants)
        self._by_bucket: dict[int, DecayingRatio] = {}
        self._by_size: dict[tuple[int, int], DecayingRatio] = {}

    def add(
        self, bucket: int, num_draft_tokens: int, expected: float, accepted: float, clock: int
    ) -> None:
        """Add the outcome of one step.

        Args:
            bucket: Batch bucket of the step, from `batch_bucket`.
            num_draft_tokens: Draft tokens of each request.
            expected: Draft tokens of the batch that the drafter expected to be accepted.
            accepted: Draft tokens of the batch that were accepted.
            clock: Number of steps observed so far.
        """
        of_bucket = self._by_bucket.setdefault(bucket, DecayingRatio(self._constants))
        of_size = self._by_size.setdefault(
            (bucket, num_draft_tokens), DecayingRatio(self._constants)
        )
        for ratio in (self._overall, of_bucket, of_size):
            ratio.add(expected, accepted, clock)

    def calibrate(
        self, expected_tokens: FloatArray, bucket: int, sizes: tuple[int, ...], clock: int
    ) -> FloatArray:
        """Correct expected tokens, `[R, S]`, by the ratios; a plain step emits one token."""
        ratios = np.array(self.ratios(bucket, sizes, clock))
        calibrated: FloatArray = 1 + ratios * (expected_tokens - 1)
        calibrated[:, 0] = 1.0
        return calibrated

    def ratios(self, bucket: int, sizes: tuple[int, ...], clock: int) -> list[float]:
        """The ratio of accepted to expected draft tokens at each of `sizes`."""
        ratio = self._overall.value(1.0, clock)
        if (of_bucket := self._by_bucket.get(bucket)) is not None:
            ratio = of_bucket.value(ratio, clock)
        known = (self._by_size.get((bucket, size)) for size in sizes)
        return [of_size.value(ratio, clock) if of_size else ratio for of_size in known]
