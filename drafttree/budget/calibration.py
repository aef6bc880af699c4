"""Acceptance calibration: how many of the draft tokens that a drafter expects are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drafttree.arrays import FloatArray, LongArray
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.decaying_ratio import DecayingRatio

_LEVELS = 3


def certainty(expected_tokens: FloatArray, sizes: tuple[int, ...]) -> LongArray:
    """How certain the drafts of each request are, `[R]`: 0, 1 or 2.

    What is accepted of guesses says little of copies, whose tokens are nearly certain.

    Args:
        expected_tokens: `[R, S]`, tokens that each request is expected to emit at each of `sizes`.
        sizes: Numbers of draft tokens, ascending from 0.
    """
    if len(sizes) == 1:
        return np.zeros(len(expected_tokens), np.int64)
    mean_scores = (expected_tokens[:, 1] - 1) / sizes[1]
    levels: LongArray = np.minimum(_LEVELS * mean_scores, _LEVELS - 1).astype(np.int64)
    return levels


class VerifiedDrafts(NamedTuple):
    """What was verified of each request's drafts in a step, without what a grammar adds.

    Attributes:
        draft_tokens: `[B]`, draft tokens that were verified, and those that a grammar forbids; the
            host may have cut the tree.
        accepted: `[B]`, draft tokens that were accepted.
    """

    draft_tokens: LongArray
    accepted: FloatArray


class AcceptanceCalibration:
    """The ratio of accepted to expected draft tokens, by groups of requests and size.

    The estimate is hierarchical: the ratio over all steps is the prior of a group's ratio, which is
    the prior of the ratio of one size in that group. Without new samples all of them decay to 1.
    The bonus token, which a plain step emits as well, is not counted.

    A long copy is accepted as a whole or breaks off, so its tokens do not count as so many
    outcomes: they count as `most_expected` at most.
    """

    def __init__(self, sizes: Sequence[int], constants: BudgetConstants) -> None:
        """Start without samples.

        Args:
            sizes: Numbers of draft tokens, ascending from 0.
            constants: Tuned constants.
        """
        self._sizes = tuple(sizes)
        self._constants = constants
        self._overall = DecayingRatio(constants)
        self._by_group: dict[int, DecayingRatio] = {}
        self._by_size: dict[tuple[int, int], DecayingRatio] = {}
        # The ratios by group at a clock, which are asked for more than once in a step.
        self._ratios: dict[int, list[float]] = {}
        self._ratios_at = -1

    def add(
        self,
        groups: LongArray,
        num_draft_tokens: int,
        expected: FloatArray,
        accepted: FloatArray,
        clock: int,
    ) -> None:
        """Add the outcome of one step.

        Args:
            groups: `[B]`, group of each request.
            num_draft_tokens: Draft tokens of each request.
            expected: `[B]`, draft tokens of each request that the drafter expected to be accepted.
            accepted: `[B]`, draft tokens that were accepted.
            clock: Number of steps observed so far.
        """
        self._ratios.clear()
        weights = 1 / np.maximum(expected / self._constants.most_expected, 1.0)
        predicted, actual = weights * expected, weights * accepted
        self._overall.add(float(predicted.sum()), float(actual.sum()), clock)
        for group in set(groups.tolist()):
            own = groups == group
            sums = float(predicted[own].sum()), float(actual[own].sum())
            of_group = self._by_group.setdefault(group, DecayingRatio(self._constants))
            of_size = self._by_size.setdefault(
                (group, num_draft_tokens), DecayingRatio(self._constants)
            )
            of_group.add(*sums, clock)
            of_size.add(*sums, clock)

    def calibrate(self, expected_tokens: FloatArray, groups: LongArray, clock: int) -> FloatArray:
        """Correct expected tokens, `[R, S]`, by the ratios; a plain step emits one token."""
        calibrated: FloatArray = 1 + self.ratios(groups, clock) * (expected_tokens - 1)
        calibrated[:, 0] = 1.0
        return calibrated

    def ratios(self, groups: LongArray, clock: int) -> FloatArray:
        """The ratio of accepted to expected draft tokens at each size, `[R, S]`."""
        if clock != self._ratios_at:
            self._ratios.clear()
            self._ratios_at = clock
        found = groups.tolist()
        for group in found:
            if group not in self._ratios:
                self._ratios[group] = self._of_group(group, clock)
        return np.array([self._ratios[group] for group in found])

    def _of_group(self, group: int, clock: int) -> list[float]:
        ratio = self._overall.value(1.0, clock)
        if (of_group := self._by_group.get(group)) is not None:
            ratio = of_group.value(ratio, clock)
        known = (self._by_size.get((group, size)) for size in self._sizes)
        return [of_size.value(ratio, clock) if of_size else ratio for of_size in known]
