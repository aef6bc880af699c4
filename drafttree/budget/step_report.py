"""What the planner predicted and what was measured, summed by batch bucket and size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredStep:
    """A step, what was predicted of it, and what was measured; tokens are those of the whole batch.

    Attributes:
        bucket: Batch bucket of the step, from `batch_bucket`.
        num_draft_tokens: Draft tokens of each request that were chosen.
        batch_size: Number of requests.
        rows: Tokens that were verified, roots included.
        predicted_seconds: Predicted duration.
        seconds: Duration.
        expected_tokens: Tokens that were expected; those that grammars make certain or likely are
            not predicted, and count as expected.
        emitted_tokens: Tokens that were emitted.
        is_trial: Whether the step was taken only to measure its size.
        is_wasted: Whether drafts were looked up and not used.
    """

    bucket: int
    num_draft_tokens: int
    batch_size: int
    rows: int
    predicted_seconds: float
    seconds: float
    expected_tokens: float
    emitted_tokens: float
    is_trial: bool
    is_wasted: bool


@dataclass
class _Sums:
    steps: int = 0
    trials: int = 0
    wasted: int = 0
    predicted_seconds: float = 0.0
    seconds: float = 0.0
    expected_tokens: float = 0.0
    emitted_tokens: float = 0.0
    requests: int = 0
    rows: int = 0


class StepReport:
    """Sums over all steps, for `drafttree bench --explain` and `drafttree budget`."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], _Sums] = {}

    def add(self, step: MeasuredStep) -> None:
        """Add one step."""
        sums = self._sums.setdefault((step.bucket, step.num_draft_tokens), _Sums())
        sums.steps += 1
        sums.trials += step.is_trial
        sums.wasted += step.is_wasted
        sums.predicted_seconds += step.predicted_seconds
        sums.seconds += step.seconds
        sums.expected_tokens += step.expected_tokens
        sums.emitted_tokens += step.emitted_tokens
        sums.requests += step.batch_size
        sums.rows += step.rows

    def rows(self) -> list[dict[str, float]]:
        """One row for each batch bucket and size that was used, in ascending order.

        Returns:
            Rows, ready for JSON, with the keys

            * `batch`: the batch bucket, a power of two;
            * `num_draft_tokens`: draft tokens of a request, 0 for plain steps;
            * `steps` and `share`: number of steps, and their share of the bucket's steps;
            * `rows`: mean rows of a request that were verified, its root included;
            * `trials`: steps taken only to measure this size;
            * `wasted`: plain steps for which drafts were looked up and not used;
            * `predicted_ms`, `observed_ms`: mean time of a step;
            * `expected_tokens`, `realised_tokens`: mean tokens of a request in a step;
            * `tokens_per_second`: throughput of the whole batch.
        """
        steps: dict[int, int] = {}
        for (bucket, _), sums in self._sums.items():
            steps[bucket] = steps.get(bucket, 0) + sums.steps
        return [
            {
                "batch": bucket,
                "num_draft_tokens": num_draft_tokens,
                "steps": sums.steps,
                "share": sums.steps / steps[bucket],
                "rows": sums.rows / sums.requests,
                "trials": sums.trials,
                "wasted": sums.wasted,
                "predicted_ms": 1e3 * sums.predicted_seconds / sums.steps,
                "observed_ms": 1e3 * sums.seconds / sums.steps,
                "expected_tokens": sums.expected_tokens / sums.requests,
                "realised_tokens": sums.emitted_tokens / sums.requests,
                "tokens_per_second": sums.emitted_tokens / sums.seconds,
            }
            for (bucket, num_draft_tokens), sums in sorted(self._sums.items())
        ]
