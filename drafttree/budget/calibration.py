"""Acceptance calibration: how many of the draft tokens that a drafter expects are accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drafttree.budget.constants import BudgetConstants


@dataclass
class _DecayingSums:
    """Sums of expected and accepted draft tokens that forget old steps exponentially."""

    expected: float = 0.0
    accepted: float = 0.0
    updated_at: int = 0

    def add(self, expected: float, accepted: float, clock: int, constants: BudgetConstants) -> None:
        age = clock - self.updated_at
        weight = math.exp(-1 / constants.sample_decay - age / constants.age_decay)
        self.expected = self.expected * weight + expected
        self.accepted = self.accepted * weight + accepted
        self.updated_at = clock

    def ratio(self, prior: float, prior_weight: float, clock: int, age_decay: float) -> float:
        weight = math.exp(-(clock - self.updated_at) / age_decay)
        return (prior * prior_weight + weight * self.accepted) / (
            prior_weight + weight * self.expected
        )


class AcceptanceCalibration:
    """The ratio of accepted to expected draft tokens, by batch bucket and size.

    The estimate is hierarchical: the ratio over all steps is the prior of a batch bucket's ratio,
    which is the prior of the ratio of one size in that bucket. Without new samples all of them
    decay to 1. The bonus token, which a plain step emits as well, is not counted.
    """

    def __init__(self, constants: BudgetConstants) -> None:
        self._constants = constants
        self._overall = _DecayingSums()
        self._by_bucket: dict[int, _DecayingSums] = {}
        self._by_size: dict[tuple[int, int], _DecayingSums] = {}

    def add(
        self, bucket: int, num_draft_tokens: int, expected: float, accepted: float, clock: int
    ) -> None:
        """Add the outcome of one step.

        Args:
            bucket: Batch bucket of the step, from `batch_bucket`.
            num_draft_tokens: Draft tokens of each request.
            expected: Mean draft tokens of a request that the drafter expected to be accepted.
            accepted: Mean draft tokens of a request that were accepted.
            clock: Number of steps observed so far.
        """
        samples = min(bucket, self._constants.max_independent_requests)
        of_bucket = self._by_bucket.setdefault(bucket, _DecayingSums())
        of_size = self._by_size.setdefault((bucket, num_draft_tokens), _DecayingSums())
        for sums in (self._overall, of_bucket, of_size):
            sums.add(expected * samples, accepted * samples, clock, self._constants)

    def ratios(self, bucket: int, sizes: tuple[int, ...], clock: int) -> list[float]:
        """The ratio of accepted to expected draft tokens at each of `sizes`."""
        constants = self._constants
        decay = constants.age_decay
        ratio = self._overall.ratio(1.0, constants.prior_weight, clock, decay)
        if (of_bucket := self._by_bucket.get(bucket)) is not None:
            ratio = of_bucket.ratio(ratio, constants.batch_prior_weight, clock, decay)
        known = (self._by_size.get((bucket, size)) for size in sizes)
        weight = constants.size_prior_weight
        return [sums.ratio(ratio, weight, clock, decay) if sums else ratio for sums in known]
