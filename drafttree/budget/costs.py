"""Cost model: the time of a decode step by batch size and number of draft tokens.

A step of B requests with n draft tokens each verifies B (n + 1) tokens. Forwards measured at
start-up give a curve over that token count. The times of whole steps then correct the curve by one
ratio for each (batch bucket, n) and by a global level that all of them share. The level absorbs
whatever makes every step slower, such as a busy machine or longer contexts, so a size that has not
been used for a while moves along with the others, and the choice between two sizes does not change
only because one of them was measured more recently.

Ratios, level and noise are logarithms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from drafttree.budget.constants import BudgetConstants


def batch_bucket(batch_size: int) -> int:
    """The power of two nearest to a batch size by ratio: 1, 2, 4 (for 3 to 5), 8 (for 6 to 11).

    Raises:
        ValueError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: a step has at least one request")
    return 1 << round(math.log2(batch_size))


@dataclass
class _Estimate:
    """The estimate for one (batch bucket, n).

    Attributes:
        ratio: Logarithm of measured over predicted seconds, global level subtracted.
        recent: The last samples of that ratio.
        count: Number of samples since the estimate was last replaced.
        visit: Number of samples since the estimate was last stale.
        seen_at: Step of the last sample.
        level: Global level at the last sample.
    """

    ratio: float
    recent: deque[float]
    count: int
    visit: int
    seen_at: int
    level: float


class CostModel:
    """Seconds of a decode step as a function of (batch size, n), n the draft tokens of a request.

    Attributes:
        forward_seconds: The measured forwards, seconds by token count.
        clock: Number of steps observed so far.
    """

    def __init__(
        self,
        forward_seconds: Mapping[int, float],
        constants: BudgetConstants | None = None,
    ) -> None:
        """Start from measured forwards.

        Args:
            forward_seconds: Seconds of a forward by the number of its tokens.
            constants: Tuned constants; the defaults if None.

        Raises:
            ValueError: There is no forward, or one without tokens or without time.
        """
        self._constants = constants or BudgetConstants()
        if not forward_seconds or any(
            not (tokens >= 1 and 0 < seconds < math.inf)
            for tokens, seconds in forward_seconds.items()
        ):
            raise ValueError(
                f"forward_seconds={dict(forward_seconds)}: give at least one token count and its "
                "seconds, both positive"
            )
        self.forward_seconds = dict(forward_seconds)
        self._token_counts = sorted(forward_seconds)
        self._times = [forward_seconds[count] for count in self._token_counts]
        self._curve: dict[int, float] = {}
        self._estimates: dict[tuple[int, int], _Estimate] = {}
        self._substitutes: dict[tuple[int, int], _Estimate | None] = {}
        self._level = 0.0
        self._noise = self._constants.initial_noise
        self.clock = 0

    def forward(self, num_tokens: int) -> float:
        """Predicted seconds of a forward, level and ratios left out.

        Linear between the measured token counts and extrapolated with the last slope, which is
        taken as 0 where noise made it negative.
        """
        known = self._curve.get(num_tokens)
        if known is None:
            known = self._curve[num_tokens] = self._interpolate(num_tokens)
        return known

    def seconds(self, batch_size: int, n: int) -> float:
        """Predicted seconds of a step with `n` draft tokens a request; a plain step at `n=0`."""
        key = batch_bucket(batch_size), n
        return self._predict(batch_size, n, self._ratio(key))

    def optimistic_seconds(self, batch_size: int, n: int) -> float:
        """The prediction that follows the last sample if it was an outlier.

        The outlier may be the first sample of a lasting change. With too few samples for an
        estimate, the fastest of them counts.
        """
        estimate = self._estimates.get((batch_bucket(batch_size), n))
        if estimate is not None and estimate.count < self._constants.min_samples:
            return self._predict(batch_size, n, min(estimate.recent))
        if estimate is not None and self._is_outlier(estimate.recent[-1] - estimate.ratio):
            return self._predict(batch_size, n, estimate.recent[-1])
        return self.seconds(batch_size, n)

    def observe(self, batch_size: int, n: int, seconds: float) -> None:
        """Learn from the measured time of a step with `n` draft tokens a request.

        Raises:
            ValueError: `seconds` is not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds={seconds}: the time of a step must be positive and finite")
        self.clock += 1
        key = batch_bucket(batch_size), n
        sample = math.log(seconds / self.forward(batch_size * (n + 1))) - self._level
        estimate = self._estimates.get(key)
        if estimate is None:
            # The prediction counts as the first sample, so that one outlier does not decide alone.
            prediction = self._ratio(key) if self._estimates else sample
            recent = deque([prediction, sample], maxlen=self._constants.consensus_samples)
            self._estimates[key] = _Estimate(median(recent), recent, 1, 1, self.clock, self._level)
            self._substitutes.clear()
            return
        if self.clock - estimate.seen_at > self._constants.stale_after:
            estimate.visit = 0
        estimate.visit += 1
        estimate.count += 1
        estimate.recent.append(sample)
        self._update(estimate, sample)
        estimate.seen_at, estimate.level = self.clock, self._level

    def needs_sample(self, batch_size: int, n: int) -> bool:
        """Whether the estimate is unreliable.

        It is if there are too few samples, if the last one was an outlier, or if the global level
        has moved since.
        """
        estimate = self._estimates.get((batch_bucket(batch_size), n))
        return (
            estimate is None
            or estimate.count < self._constants.min_samples
            or self._is_outlier(estimate.recent[-1] - estimate.ratio)
            or abs(self._level - estimate.level) > self._constants.drift_threshold
        )

    def age(self, batch_size: int, n: int) -> int:
        """Steps since the last sample at (batch size, n); all steps if there was none."""
        estimate = self._estimates.get((batch_bucket(batch_size), n))
        return self.clock - (estimate.seen_at if estimate else 0)

    def num_samples(self, batch_size: int, n: int) -> int:
        """Number of samples at (batch size, n) since its estimate was last replaced."""
        estimate = self._estimates.get((batch_bucket(batch_size), n))
        return estimate.count if estimate else 0

    def _update(self, estimate: _Estimate, sample: float) -> None:
        constants = self._constants
        if estimate.count <= constants.min_samples:
            estimate.ratio = median(list(estimate.recent)[-constants.min_samples :])
            return
        # A shift in the size in use is attributed to the global level until another size is
        # measured; a shift found on returning to a size is its own.
        in_use = (
            estimate.count > constants.settled_samples and estimate.visit > constants.settled_visit
        )
        needed = constants.consensus_samples if in_use else constants.min_samples
        deviations = [value - estimate.ratio for value in estimate.recent][-needed:]
        if all(map(self._is_outlier, deviations)) and (min(deviations) > 0 or max(deviations) < 0):
            shift = median(deviations)
            if in_use:
                self._level += shift
                estimate.recent.extend([estimate.ratio] * constants.consensus_samples)
            else:
                estimate.ratio += shift
                estimate.count = constants.min_samples
            return
        limit = constants.outlier_sigmas * self._noise
        deviation = min(limit, max(-limit, sample - estimate.ratio))
        noise = self._noise + constants.noise_rate * (abs(deviation) - self._noise)
        self._noise = max(constants.min_noise, noise)
        if in_use:
            self._level += constants.level_rate * deviation
            estimate.ratio += constants.ratio_rate * deviation
        else:
            estimate.ratio += deviation * max(1 / estimate.count, constants.min_ratio_rate)

    def _is_outlier(self, deviation: float) -> bool:
        return abs(deviation) > self._constants.outlier_sigmas * self._noise

    def _predict(self, batch_size: int, n: int, ratio: float) -> float:
        return self.forward(batch_size * (n + 1)) * math.exp(self._level + ratio)

    def _ratio(self, key: tuple[int, int]) -> float:
        estimate = self._estimates.get(key)
        if estimate is not None:
            return estimate.ratio
        if key not in self._substitutes:
            self._substitutes[key] = self._nearest(*key)
        substitute = self._substitutes[key]
        return substitute.ratio if substitute else 0.0

    def _nearest(self, bucket: int, n: int) -> _Estimate | None:
        """The estimate that is used for a (batch bucket, n) without samples.

        Estimates of steps with drafts are preferred for steps with drafts, as all of them include
        the drafter's own time; then the nearest batch bucket, then the nearest size.
        """

        def distance(key: tuple[int, int]) -> tuple[bool, float, float, int]:
            return (
                (key[1] > 0) != (n > 0),
                abs(math.log2(key[0] / bucket)),
                abs(math.log((key[1] + 1) / (n + 1))),
                key[1],
            )

        return self._estimates[min(self._estimates, key=distance)] if self._estimates else None

    def _interpolate(self, num_tokens: int) -> float:
        right = bisect_left(self._token_counts, num_tokens)
        if right == 0 or len(self._token_counts) == 1:
            return self._times[0]
        beyond = right == len(self._token_counts)
        right = min(right, len(self._token_counts) - 1)
        first, last = self._times[right - 1], self._times[right]
        width = self._token_counts[right] - self._token_counts[right - 1]
        slope = (last - first) / width
        if beyond:
            slope = max(0.0, slope)
        return last + slope * (num_tokens - self._token_counts[right])
