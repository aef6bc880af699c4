"""Cost model: the mean time of a decode step by its requests and rows.

A step of B requests verifies `rows` tokens: each request's root and its draft tokens. Forwards
measured at start-up give a curve over the rows. The times of whole steps then correct the curve by
a factor for each batch bucket and candidate size; between two sizes it is interpolated. The factors
are estimated together, by a Kalman filter on their logarithms: sizes share most of what makes steps
slower, such as a busy machine or longer contexts, and neighbouring sizes share more. So a size that
has not been used for a while moves along with the others and becomes uncertain.

The filter follows the usual time of a step. The mean is larger if some steps stall; its ratio to
the usual time is measured over more steps, for plain steps and for steps with drafts. One long
stall is no measure of how often steps of its kind stall, so it counts in part there, and as a whole
in the ratio of all steps.

Grammars may add rows to those that were chosen, in plain steps too. A step with such rows is one of
the size that was chosen: the curve accounts for what they take. As many are expected of each
request in later steps as there were on average.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from drafttree.arrays import FloatArray
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.cost_factors import Factors, Recheck, project, value_at
from drafttree.budget.decaying_ratio import DecayingRatio, StallRatio
from drafttree.budget.forward_curve import ForwardCurve

_LEAST_VARIANCE = 1e-4
"""Of the logarithm of a step's time: times vary by 1% at least."""
_DOUBTFUL = math.log(1.25)
"""Logarithm of the time, as a multiple of its prediction, beyond which the first step of a kind is
measured again."""


def batch_bucket(batch_size: int) -> int:
    """The power of two nearest to a batch size by ratio: 1, 2, 4 (for 3 to 5), 8 (for 6 to 11).

    Raises:
        ValueError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: a step has at least one request")
    return 1 << round(math.log2(batch_size))


class CostModel:
    """Mean seconds of a decode step as a function of its batch size and rows.

    Attributes:
        candidate_sizes: Draft tokens of a request to choose from, ascending from 0.
        clock: Number of steps so far.
    """

    def __init__(
        self,
        candidate_sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
        constants: BudgetConstants | None = None,
    ) -> None:
        """Start from measured forwards.

        Args:
            candidate_sizes: Draft tokens of a request to choose from, ascending from 0.
            forward_seconds: Seconds of a forward by the number of its tokens.
            constants: Tuned constants; the defaults if None.

        Raises:
            ValueError: There is no forward, or one without tokens or without time.
        """
        self._constants = constants = constants or BudgetConstants()
        self.candidate_sizes = tuple(candidate_sizes)
        self.curve = ForwardCurve(forward_seconds)
        # A random walk over the doublings of rows, from the level of a plain step.
        self._doublings = doublings = np.log2(np.array(self.candidate_sizes) + 1.0)
        self._prior = constants.level_spread**2 + constants.row_spread**2 * np.minimum(
            doublings, doublings[:, None]
        )
        self._buckets: dict[int, Factors] = {}
        self._variance = constants.initial_noise**2
        self._paid = DecayingRatio(constants)
        self._paid_by_kind = StallRatio(constants), StallRatio(constants)
        self._added_rows = DecayingRatio(constants)
        self.clock = 0
        # What is asked for more than once between two steps.
        self._forwards: dict[int, FloatArray] = {}
        self._of_sizes: tuple[int, int, FloatArray] | None = None
        self._mean_ratios: tuple[int, float, float] | None = None

    def seconds(self, batch_size: int, rows: int, added_rows: int | None = None) -> float:
        """Predicted mean seconds of a step.

        Args:
            batch_size: Number of requests.
            rows: Tokens to verify, roots included, without those that grammars add.
            added_rows: Tokens that grammars add; None for as many as usual.
        """
        factor = value_at(self._factors(batch_size).mean, *self._place(batch_size, rows))
        if added_rows is None:
            forward = self._usual_forward(batch_size, rows)
        else:
            forward = self.curve.seconds(rows + added_rows)
        return forward * math.exp(factor) * self._mean_ratio(rows > batch_size)

    def unstalled_plain_seconds(self, batch_size: int) -> float:
        """Predicted mean seconds of a plain step, if it stalls no more than was measured.

        Where few plain steps were measured, `seconds` supposes that they stall like all others.
        """
        forward = self._usual_forward(batch_size, batch_size)
        usual = forward * math.exp(self._factors(batch_size).mean[0])
        return usual * self._paid_by_kind[False].value(1.0, self.clock)

    def of_sizes(self, batch_size: int) -> FloatArray:
        """Predicted mean seconds at each candidate size, `[S]`."""
        known = self._of_sizes
        if known is None or known[:2] != (self.clock, batch_size):
            seconds = self.usual_of_sizes(batch_size)
            seconds[0] *= self._mean_ratio(False)
            seconds[1:] *= self._mean_ratio(True)
            known = self._of_sizes = self.clock, batch_size, seconds
        return known[2].copy()

    def usual_of_sizes(self, batch_size: int) -> FloatArray:
        """Predicted seconds at each candidate size of steps that do not stall, `[S]`."""
        forwards = self._usual_forwards(batch_size)
        seconds: FloatArray = forwards * np.exp(self._factors(batch_size).mean)
        return seconds

    @property
    def knows_stalls_of_drafts(self) -> bool:
        """Whether enough steps with drafts were measured to say how often they stall."""
        return self._paid_by_kind[True].predicted >= 2 * self._constants.prior_weight

    def deviations(self, batch_size: int, index: int) -> FloatArray:
        """How uncertain each size's time is relative to that of the size at `index`, `[S]`.

        Returns:
            Standard deviations of the logarithm of the ratio of both times.
        """
        covariance = self._factors(batch_size).covariance
        diagonal = covariance.diagonal()
        variances = diagonal + diagonal[index] - 2 * covariance[index]
        deviations: FloatArray = np.sqrt(np.maximum(variances, 0.0))
        return deviations

    def by_curve(self, batch_size: int) -> FloatArray:
        """Predicted mean seconds at each candidate size if steps with drafts deviated from the
        curve by the same factor as plain steps, `[S]`."""
        forwards = self._usual_forwards(batch_size)
        seconds: FloatArray = forwards * (self.of_sizes(batch_size)[0] / forwards[0])
        return seconds

    def is_doubtful(self, batch_size: int, *, drafted: bool) -> bool:
        """Whether the last step of a kind, plain or with drafts, was unexpectedly slow, and the
        first one for as many steps as it takes to forget the others."""
        return self._factors(batch_size).doubtful[drafted]

    def surprises(self, batch_size: int) -> FloatArray | None:
        """The factor by which the last step of each size took less time than expected, `[S]`.

        It may have been the first of many. 1 if it was no outlier, or took more time; None if that
        is so of all sizes.
        """
        runs = self._factors(batch_size).outliers
        if not any(run and run[-1] < 0 for run in runs):
            return None
        return np.exp([min(run[-1], 0.0) if run else 0.0 for run in runs])

    def recheck(self, batch_size: int) -> Recheck | None:
        """What there is to measure again since the last lasting change; None if there was none."""
        factors = self._factors(batch_size)
        if factors.changed_at is None:
            return None
        wait = max(self._constants.recheck_steps, factors.checked_at - factors.changed_at)
        return Recheck(factors.changed, self.clock - factors.checked_at, wait)

    def observe(self, batch_size: int, rows: int, seconds: float, added_rows: int = 0) -> bool:
        """Learn from the measured time of a step.

        Args:
            batch_size: Number of its requests.
            rows: Tokens that were verified, roots included, without those that grammars have added.
            seconds: Duration of the step.
            added_rows: Tokens that grammars have added.

        Returns:
            Whether the times have changed so that all sizes are to be measured again.

        Raises:
            ValueError: `seconds` is not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds={seconds}: the time of a step must be positive and finite")
        self.clock += 1
        self._added_rows.add(batch_size, added_rows, self.clock)
        place = self._place(batch_size, rows)
        factors = self._factors(batch_size)
        kept = math.exp((factors.seen_at - self.clock) / self._constants.forget_steps)
        factors.covariance *= kept
        factors.covariance += (1 - kept) * self._prior
        factors.seen_at = self.clock
        sample = math.log(seconds / self.curve.seconds(rows + added_rows))
        gradient, variance = project(factors.covariance, *place)
        surprise = sample - value_at(factors.mean, *place)
        drafted = rows > batch_size
        is_first = self.clock - factors.seen_of_kind[drafted] > self._constants.forget_steps
        factors.doubtful[drafted] = is_first and surprise > _DOUBTFUL
        factors.seen_of_kind[drafted] = self.clock
        change = self._change(factors, place[0], surprise, variance)
        if change is not None:
            surprise = change
            factors.changed_at = factors.checked_at = self.clock
            factors.changed = place[0]
            factors.covariance[:] = self._prior + change**2 * self._of_change(place[0])
            gradient, variance = project(factors.covariance, *place)
        elif place[0] and factors.changed in (0, place[0]):
            factors.checked_at = self.clock
        self._update(factors, gradient, variance, surprise)
        residual = sample - value_at(factors.mean, *place)
        ratio = min(self._constants.most_paid, math.exp(residual))
        for paid in (self._paid, self._paid_by_kind[drafted]):
            paid.add(1.0, ratio, self.clock)
        return change is not None

    def skip(self) -> None:
        """Let a step pass whose time is of something else too."""
        self.clock += 1

    def _change(
        self, factors: Factors, size: int, surprise: float, variance: float
    ) -> float | None:
        """The least of several outliers of a size in a row to one side: it has changed."""
        constants, run = self._constants, factors.outliers[size]
        if surprise**2 <= self._outlier_limit(variance):
            run.clear()
            return None
        if run and (run[-1] > 0) != (surprise > 0):
            run.clear()
        run.append(surprise)
        if len(run) < constants.agreeing_outliers:
            return None
        least = min(run, key=abs)
        run.clear()
        return least

    def _of_change(self, index: int) -> FloatArray:
        """What may have changed besides the level, `[S, S]`, as variances at a size of 1.

        Steps of the size's kind alone, with drafts or without; or the cost of a row.
        """
        alike = (np.arange(len(self._doublings)) > 0) == (index > 0)
        kinds: FloatArray = np.outer(alike, alike)
        if index == 0:
            return kinds
        slopes = self._doublings / self._doublings[index]
        both: FloatArray = kinds + np.outer(slopes, slopes)
        return both

    def _update(
        self, factors: Factors, gradient: FloatArray, variance: float, surprise: float
    ) -> None:
        """The update of a Kalman filter, in which an outlier counts as a noisy sample."""
        constants, limit = self._constants, self._outlier_limit(variance)
        noise = self._variance
        if surprise**2 > limit:
            noise = surprise**2 / constants.outlier_sigmas**2
        gain = gradient / (variance + noise)
        factors.mean += gain * surprise
        factors.covariance -= gain[:, None] * gradient
        # What remains of the surprise is noise; a large part of it is explained at the start.
        unexplained = min(surprise**2, limit) * self._variance / (variance + self._variance)
        self._variance += constants.noise_rate * (unexplained - self._variance)
        self._variance = max(self._variance, _LEAST_VARIANCE)

    def _outlier_limit(self, variance: float) -> float:
        """The square of a surprise beyond which a sample is an outlier."""
        return self._constants.outlier_sigmas**2 * (variance + self._variance)

    def _mean_ratio(self, drafted: bool) -> float:
        """Ratio of the mean to the usual time, of plain steps or of steps with drafts."""
        known = self._mean_ratios
        if known is None or known[0] != self.clock:
            overall = self._paid.value(1.0, self.clock)
            plain, with_drafts = (kind.value(overall, self.clock) for kind in self._paid_by_kind)
            known = self._mean_ratios = self.clock, plain, with_drafts
        return known[1 + drafted]

    def _usual_forwards(self, batch_size: int) -> FloatArray:
        """Seconds of a forward at each candidate size, with the rows that grammars add, `[S]`."""
        known = None if self._added_rows.actual else self._forwards.get(batch_size)
        if known is None:
            rows = [batch_size * (1 + size) for size in self.candidate_sizes]
            known = np.array([self._usual_forward(batch_size, each) for each in rows])
            if not self._added_rows.actual:
                self._forwards[batch_size] = known
        return known

    def _usual_forward(self, batch_size: int, rows: int) -> float:
        """Seconds of a forward over `rows` tokens and those that grammars add on average."""
        if not self._added_rows.actual:
            return self.curve.seconds(rows)
        # No tree has more nodes than one of the largest size.
        room = batch_size * (self.candidate_sizes[-1] + 1) - rows
        usual = batch_size * self._added_rows.value(0.0, self.clock)
        added = max(0.0, min(usual, room))
        whole = int(added)
        less, more = (self.curve.seconds(rows + whole + one) for one in (0, 1))
        return less + (added - whole) * (more - less)

    def _place(self, batch_size: int, rows: int) -> tuple[int, float]:
        """The size at or below a step's mean draft tokens, and its weight against the next."""
        sizes = self.candidate_sizes
        if rows <= batch_size:
            return 0, 1.0
        tokens = rows / batch_size - 1
        above = bisect_left(sizes, tokens)
        if above >= len(sizes) or sizes[above] == tokens or above == 1:
            # Few drafts of a batch cost as the smallest size does, not as a plain step.
            return min(above, len(sizes) - 1), 1.0
        width = sizes[above] - sizes[above - 1]
        return above - 1, (sizes[above] - tokens) / width

    def _factors(self, batch_size: int) -> Factors:
        """The factors of a batch's bucket; at first those of the nearest bucket, as uncertain as
        without any sample."""
        bucket = batch_bucket(batch_size)
        factors = self._buckets.get(bucket)
        if factors is None:
            nearest = min(
                self._buckets, key=lambda other: abs(math.log2(other / bucket)), default=None
            )
            mean = (
                np.zeros(len(self.candidate_sizes))
                if nearest is None
                else self._buckets[nearest].mean
            )
            factors = self._buckets[bucket] = Factors(mean, self._prior, self.clock)
        return factors
