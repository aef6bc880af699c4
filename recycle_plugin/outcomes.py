"""What decode steps promised and what came of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

# Steps after which a booked outcome has lost most of its weight: steps booked, and steps gone by.
BOOKED, GONE_BY = 128, 2048
# Expected tokens at which what was seen weighs as much as what is taken before: that promises are
# kept, that a bucket is as all are, that a rung is as its bucket.
TRUST, TRUST_BUCKET, TRUST_RUNG = 12.0, 16.0, 32.0
# Requests of one step share a time of day and a text's kind: they are no more witnesses than this.
MOST_WITNESSES = 8


@dataclass
class _Tally:
    promised: float = 0.0
    emitted: float = 0.0
    booked_at: int = 0

    def book(self, promised: float, emitted: float, clock: int) -> None:
        keep = math.exp(-1 / BOOKED - (clock - self.booked_at) / GONE_BY)
        self.promised = self.promised * keep + promised
        self.emitted = self.emitted * keep + emitted
        self.booked_at = clock

    def ratio(self, before: float, trust: float, clock: int) -> float:
        keep = math.exp(-(clock - self.booked_at) / GONE_BY)
        return (before * trust + keep * self.emitted) / (trust + keep * self.promised)


class Calibration:
    """How many of the promised drafts are accepted, by bucket of batch sizes and rung.

    Ratios count the tokens beyond the one that a plain step emits. What is known of a bucket
    stands in for its rungs, what is known of all for a bucket; with time all return to 1.
    """

    def __init__(self) -> None:
        self._all = _Tally()
        self._buckets: dict[int, _Tally] = {}
        self._rungs: dict[tuple[int, int], _Tally] = {}

    def book(self, bucket: int, n: int, promised: float, emitted: float, clock: int) -> None:
        """Book a step's mean drafts a request, promised and accepted; `clock` counts steps."""
        witnesses = min(bucket, MOST_WITNESSES)
        of_bucket = self._buckets.setdefault(bucket, _Tally())
        of_rung = self._rungs.setdefault((bucket, n), _Tally())
        for tally in (self._all, of_bucket, of_rung):
            tally.book(promised * witnesses, emitted * witnesses, clock)

    def ratios(self, bucket: int, ladder: tuple[int, ...], clock: int) -> list[float]:
        """Accepted over promised drafts for each rung of the ladder."""
        ratio = self._all.ratio(1.0, TRUST, clock)
        if (of_bucket := self._buckets.get(bucket)) is not None:
            ratio = of_bucket.ratio(ratio, TRUST_BUCKET, clock)
        tallies = (self._rungs.get((bucket, n)) for n in ladder)
        return [t.ratio(ratio, TRUST_RUNG, clock) if t else ratio for t in tallies]


@dataclass
class _Sums:
    steps: int = 0
    trials: int = 0
    in_vain: int = 0
    predicted: float = 0.0
    seconds: float = 0.0
    promised: float = 0.0
    emitted: float = 0.0
    requests: int = 0


@dataclass(frozen=True)
class Row:
    """The steps of one bucket at one rung.

    Attributes:
        batch: the bucket, a power of two.
        nodes: draft nodes of a request, 0 for plain steps.
        steps: how many steps; `share` is their part of the bucket's steps.
        trials: steps among them taken only to learn what they cost.
        in_vain: plain steps among them for which drafts were looked for.
        predicted_ms, observed_ms: mean time of a step, as foreseen and as it was.
        expected_tokens, realised_tokens: mean tokens of a request and step, likewise.
        tokens_per_second: of the whole batch.
    """

    batch: int
    nodes: int
    steps: int
    share: float
    trials: int
    in_vain: int
    predicted_ms: float
    observed_ms: float
    expected_tokens: float
    realised_tokens: float
    tokens_per_second: float


class Outcomes:
    """Sums over all steps, by bucket of batch sizes and rung."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], _Sums] = {}

    def book(
        self,
        bucket: int,
        n: int,
        batch: int,
        *,
        predicted: float,
        seconds: float,
        promised: float,
        emitted: float,
        trial: bool,
        in_vain: bool,
    ) -> None:
        """Add a step: seconds, and tokens of the whole batch."""
        sums = self._sums.setdefault((bucket, n), _Sums())
        sums.steps += 1
        sums.trials += trial
        sums.in_vain += in_vain
        sums.predicted += predicted
        sums.seconds += seconds
        sums.promised += promised
        sums.emitted += emitted
        sums.requests += batch

    def rows(self) -> list[Row]:
        """One row for each bucket and rung that was used, in order."""
        steps: dict[int, int] = {}
        for (bucket, _), sums in self._sums.items():
            steps[bucket] = steps.get(bucket, 0) + sums.steps
        return [
            Row(
                batch=bucket,
                nodes=n,
                steps=sums.steps,
                share=sums.steps / steps[bucket],
                trials=sums.trials,
                in_vain=sums.in_vain,
                predicted_ms=1e3 * sums.predicted / sums.steps,
                observed_ms=1e3 * sums.seconds / sums.steps,
                expected_tokens=sums.promised / sums.requests,
                realised_tokens=sums.emitted / sums.requests,
                tokens_per_second=sums.emitted / sums.seconds,
            )
            for (bucket, n), sums in sorted(self._sums.items())
        ]

    def explain(self) -> list[dict[str, float]]:
        """The rows, ready for JSON."""
        return [asdict(row) for row in self.rows()]
