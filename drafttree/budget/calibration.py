"""Acceptance calibration: how many of the draft tokens that a drafter expects are accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafttree.arrays import FloatArray
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.decaying_ratio import DecayingRatio


class VerifiedDrafts(NamedTuple):
    """What was verified of each request's drafts in a step, without what a grammar adds.

    Attributes:
        draft_tokens: `[B]`, draft tokens that were verified; the host may have cut the tree.
        accepted: `[B]`, draft tokens that were accepted.
    """

    draft_tokens: FloatArray
    accepted: FloatArray


class AcceptanceCalibration:
    """The ratio of accepted to expected draft tokens, by batch bucket and size.

    The estimate is hierarchical: the ratio over all steps is the prior of a batch bucket's ratio,
    which is the prior of the ratio of one size in that bucket. Without new samples all of them
    decay to 1. The bonus token, which a plain step emits as well, is not counted.

    A long copy is accepted as a whole or breaks off, so its tokens do not count as so many
    outcomes: they count as `most_expected` at most.
    """

    def __init__(self, constants: BudgetConstants) -> None:
        self._constants = constants
        self._overall = DecayingRatio(constants)
        self._by_bucket: dict[int, DecayingRatio] = {}
        self._by_size: dict[tuple[int, int], DecayingRatio] = {}

    def add(
        self,
        bucket: int,
        num_draft_tokens: int,
        expected: FloatArray,
        accepted: FloatArray,
        clock: int,
    ) -> None:
        """Add the outcome of one step.

        Args:
            bucket: Batch bucket of the step, from `batch_bucket`.
            num_draft_tokens: Draft tokens of each request.
            expected: `[B]`, draft tokens of each request that the drafter expected to be accepted.
            accepted: `[B]`, draft tokens that were accepted.
            clock: Number of steps observed so far.
        """
        of_bucket = self._by_bucket.setdefault(bucket, DecayingRatio(self._constants))
        of_size = self._by_size.setdefault(
            (bucket, num_draft_tokens), DecayingRatio(self._constants)
        )
        weights = 1 / np.maximum(expected / self._constants.most_expected, 1.0)
        predicted, actual = float(weights @ expected), float(weights @ accepted)
        for ratio in (self._overall, of_bucket, of_size):
            ratio.add(predicted, actual, clock)

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
