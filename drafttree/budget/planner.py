"""The planner: chooses the number of draft tokens of each decode step.

The drafter predicts how many tokens a step emits at each candidate size, and the cost model
predicts how long the step takes. The planner corrects the first by the acceptance calibration and
takes the size with the lowest mean time per token over the requests of the batch. It decodes
plainly where drafting does not clearly win.

The objective is not the throughput of the whole batch: a step takes equally long for all of its
requests, so a few requests whose drafts are accepted would slow down all others, and the batch
would hardly finish earlier.

Exploration is limited by three time budgets, see `TimeBudgets`: for probing for drafts while plain
decoding is in use, for trial steps at other sizes, and for the net loss against plain decoding.

The planner is deterministic: measured times and outcomes are arguments of its methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from drafttree.budget.calibration import AcceptanceCalibration
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import CostModel, batch_bucket
from drafttree.budget.step_report import StepReport
from drafttree.budget.time_budgets import TimeBudgets

FloatArray = np.ndarray[Any, Any]


@dataclass
class _BucketState:
    """The planner's state for one batch bucket.

    Attributes:
        size: Size in use, trials aside; 0 for plain decoding.
        gain: Harmonic mean over the requests of the tokens expected at that size. Dividing the
            time of a step by it gives the mean time per token.
        draft_seconds: Mean time of looking up drafts; None until it is measured.
        benefit: Mean saving of looking up drafts, as a share of a plain step.
    """

    size: int = 0
    gain: float = 1.0
    draft_seconds: float | None = None
    benefit: float = 0.0


@dataclass(frozen=True)
class _StepPlan:
    """The decision for the current step.

    Attributes:
        size: Draft tokens of each request.
        expected: Mean tokens of a request that the drafter expects.
        calibrated: The same after acceptance calibration.
        lowest: Calibrated tokens of the request that gains least, which may delay the batch.
        is_trial: Whether the step is taken only to measure its size.
        is_wasted: Whether drafts were looked up and are not used.
    """

    size: int
    expected: float = 1.0
    calibrated: float = 1.0
    lowest: float = 1.0
    is_trial: bool = False
    is_wasted: bool = False


class Planner:
    """Chooses one of a few candidate sizes for each decode step.

    Before each step call `should_skip_drafting`. If it returns False, look up drafts and call
    `choose`. After the step, and before the next one, call `record_step` or
    `record_truncated_step`; a step for which neither is called is ignored.

    Attributes:
        candidate_sizes: Numbers of draft tokens to choose from, ascending from 0.
        costs: The cost model.
        budgets: The time budgets.
    """

    def __init__(
        self,
        candidate_sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
        constants: BudgetConstants | None = None,
    ) -> None:
        """Plan from forwards that were measured at start-up.

        Args:
            candidate_sizes: Numbers of draft tokens to choose from, ascending from 0.
            forward_seconds: Seconds of a forward by the number of its tokens.
            constants: Tuned constants; the defaults if None.

        Raises:
            ValueError: The sizes do not start at 0 or do not ascend, or `forward_seconds` is
                empty or not positive.
        """
        if list(candidate_sizes[:1]) != [0] or any(a >= b for a, b in pairwise(candidate_sizes)):
            raise ValueError(
                f"candidate_sizes={list(candidate_sizes)}: sizes must start at 0 and ascend"
            )
        self.candidate_sizes = tuple(candidate_sizes)
        self.constants = constants or BudgetConstants()
        self.costs = CostModel(forward_seconds, self.constants)
        self.budgets = TimeBudgets()
        self._calibration = AcceptanceCalibration(self.constants)
        self._report = StepReport()
        self._states: dict[int, _BucketState] = {}
        self._bucket = 0
        self._plan: _StepPlan | None = None

    def should_skip_drafting(self, batch_size: int) -> bool:
        """Whether the next step is plain and drafts need not be looked up for it."""
        state = self._state(batch_size)
        if not self._should_skip(state, batch_size):
            return False
        self._plan = _StepPlan(0, is_trial=state.size > 0)
        return True

    def choose(self, batch_size: int, expected_tokens: FloatArray) -> int:
        """Choose the number of draft tokens of each request in the next step.

        Args:
            batch_size: Number of requests in the step.
            expected_tokens: `[R, S]`, the tokens that each request is expected to emit at each of
                the S candidate sizes, bonus token included. R may be that of an earlier step.

        Raises:
            ValueError: `expected_tokens` does not have S columns.
        """
        sizes = self.candidate_sizes
        if expected_tokens.shape[1] != len(sizes):
            raise ValueError(
                f"expected_tokens has {expected_tokens.shape[1]} columns: give one for each of "
                f"the {len(sizes)} candidate sizes"
            )
        state, costs = self._state(batch_size), self.costs
        plain_seconds = costs.seconds(batch_size, 0)
        calibrated = self.calibrate(batch_size, expected_tokens)
        expected, mean = expected_tokens.mean(0).tolist(), calibrated.mean(0).tolist()
        gains = (1 / (1 / calibrated).mean(0)).tolist()
        lowest = calibrated.min(0).tolist()
        rates = [
            gain / costs.seconds(batch_size, size) for gain, size in zip(gains, sizes, strict=True)
        ]
        # A size that adds no drafts is never chosen, whatever its predicted cost.
        for index, (smaller, larger) in enumerate(pairwise(expected), 1):
            rates[index] = rates[index] if larger > smaller else 0.0
        best = self._best(state, rates)
        trial = self._trial(batch_size, best, gains, lowest, rates)
        if trial is None:
            state.size, state.gain = sizes[best], gains[best]
            if best:
                saved = gains[best] - rates[0] * costs.seconds(batch_size, state.size)
            else:
                saved = -self._draft_seconds(state, batch_size) / plain_seconds
            state.benefit += self.constants.draft_smoothing * (saved - state.benefit)
        index = best if trial is None else trial
        self._plan = _StepPlan(
            sizes[index],
            expected[index],
            mean[index],
            lowest[index],
            is_trial=trial is not None,
            is_wasted=index == 0,
        )
        return sizes[index]

    def record_step(
        self,
        batch_size: int,
        num_draft_tokens: int,
        seconds: float,
        draft_seconds: float,
        emitted_tokens: float,
    ) -> None:
        """Learn from a step.

        Args:
            batch_size: Number of its requests.
            num_draft_tokens: Draft tokens of each request.
            seconds: Duration of the whole step.
            draft_seconds: Part of it that was spent looking up drafts.
            emitted_tokens: Tokens emitted for the whole batch.
        """
        state, costs = self._state(batch_size), self.costs
        bucket, plan = batch_bucket(batch_size), self._plan
        self._plan = None
        if plan is None or plan.size != num_draft_tokens:
            emitted = emitted_tokens / batch_size
            plan = _StepPlan(num_draft_tokens, emitted, emitted, emitted)
        if draft_seconds > 0:
            mean = self._draft_seconds(state, batch_size)
            # Other work on the machine may have delayed the drafter.
            bounded = min(draft_seconds, self.constants.max_draft_ratio * mean)
            state.draft_seconds = mean + self.constants.draft_smoothing * (bounded - mean)
        wasted = draft_seconds if plan.is_wasted else 0.0
        predicted = costs.seconds(batch_size, num_draft_tokens) + wasted
        costs.observe(batch_size, num_draft_tokens, seconds - wasted)
        if num_draft_tokens > 0:
            self._calibration.add(
                bucket,
                num_draft_tokens,
                plan.expected - 1,
                emitted_tokens / batch_size - 1,
                costs.clock,
            )
        self._settle(state, batch_size, plan, emitted_tokens / batch_size)
        self._report.add(
            bucket,
            num_draft_tokens,
            batch_size,
            predicted_seconds=predicted,
            seconds=seconds,
            expected_tokens=batch_size * plan.calibrated,
            emitted_tokens=emitted_tokens,
            is_trial=plan.is_trial,
            is_wasted=plan.is_wasted,
        )

    def record_truncated_step(self, batch_size: int, seconds: float, emitted_tokens: float) -> None:
        """Account for a step with fewer draft tokens than were chosen.

        Only the loss budget changes, because such a step gives no sample of any candidate size.
        """
        self._state(batch_size)
        self._plan = None
        self.costs.clock += 1
        plain_seconds = self.costs.seconds(batch_size, 0)
        self.budgets.loss += (
            self.constants.refill_rate * seconds
            + emitted_tokens / batch_size * plain_seconds
            - seconds
        )
        self.budgets.clamp(plain_seconds, self.constants)

    def calibrate(self, batch_size: int, expected_tokens: FloatArray) -> FloatArray:
        """Correct expected tokens, `[R, S]`, by the ratio of accepted to expected drafts."""
        ratios = self._calibration.ratios(
            batch_bucket(batch_size), self.candidate_sizes, self.costs.clock
        )
        calibrated: FloatArray = 1 + np.array(ratios) * (expected_tokens - 1)
        calibrated[:, 0] = 1.0
        return calibrated

    def mean_draft_seconds(self, batch_size: int) -> float:
        """Mean seconds of looking up drafts for a batch."""
        return self._draft_seconds(self._state(batch_size), batch_size)

    def explain(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and size; see `StepReport.rows`."""
        return self._report.rows()

    def _state(self, batch_size: int) -> _BucketState:
        bucket = batch_bucket(batch_size)
        state = self._states.setdefault(bucket, _BucketState())
        if bucket != self._bucket:
            if not self._bucket:
                plain_seconds = self.costs.seconds(batch_size, 0)
                self.budgets = TimeBudgets.initial(plain_seconds, self.constants)
            self._bucket = bucket
            state.benefit = 0.0
        return state

    def _should_skip(self, state: _BucketState, batch_size: int) -> bool:
        constants, costs, trial_budget = self.constants, self.costs, self.budgets.trial
        if self.budgets.loss < 0:
            state.size = 0
            return True
        if state.size > 0:
            loss = self._plain_loss(state, batch_size)
            if costs.needs_sample(batch_size, 0):
                # May overdraw the trial budget: if drafting has just become slow, every further
                # step costs more than this one.
                credit = constants.trial_capacity * costs.seconds(batch_size, 0)
                return trial_budget + credit >= loss
            is_due = costs.age(batch_size, 0) >= constants.plain_retry_steps
            return is_due and trial_budget >= loss
        return state.benefit <= 0 and self.budgets.probe < self._draft_seconds(state, batch_size)

    def _best(self, state: _BucketState, rates: list[float]) -> int:
        """The index of the best size under margin and hysteresis; 0 for plain decoding."""
        best = max(range(1, len(rates)), key=rates.__getitem__, default=0)
        margin = self.constants.margin
        if state.size == 0:
            margin *= self.constants.hysteresis
        else:
            current = self.candidate_sizes.index(state.size)
            if rates[best] < self.constants.hysteresis * rates[current]:
                best = current
        return best if rates[best] > margin * rates[0] else 0

    def _trial(
        self,
        batch_size: int,
        best: int,
        gains: list[float],
        lowest: list[float],
        rates: list[float],
    ) -> int | None:
        """The index of a size to try in place of the best one; None if none is due or affordable.

        While drafting, the neighbours of the best size are tried; else the best size that drafts.
        """
        constants, costs = self.constants, self.costs
        if best:
            others = [index for index in (best - 1, best + 1) if 0 < index < len(rates)]
            interval = constants.neighbour_retry_steps
        else:
            others = sorted(range(1, len(rates)), key=rates.__getitem__)[-1:]
            interval = constants.draft_retry_steps
        for index in others:
            size = self.candidate_sizes[index]
            if gains[index] <= constants.margin or not rates[index]:
                continue  # It could not win even if it cost as much as a plain step.
            grown = constants.retry_growth * costs.num_samples(batch_size, size)
            is_due = costs.age(batch_size, size) >= min(interval, grown)
            is_near_miss = (
                best == 0
                and rates[index] >= constants.near_miss * rates[0]
                and self.budgets.trial >= constants.trial_capacity / 2 * (1 / rates[0])
            )
            if is_due or is_near_miss or costs.needs_sample(batch_size, size):
                loss = costs.optimistic_seconds(batch_size, size) - lowest[index] / rates[best]
                if self.budgets.trial >= loss:
                    return index
        return None

    def _draft_seconds(self, state: _BucketState, batch_size: int) -> float:
        if state.draft_seconds is None:
            return self.constants.initial_draft_share * self.costs.seconds(batch_size, 0)
        return state.draft_seconds

    def _plain_loss(self, state: _BucketState, batch_size: int) -> float:
        """Seconds that a plain step loses against the size in use."""
        instead = self.costs.seconds(batch_size, state.size) / state.gain if state.size else 0.0
        return max(0.0, self.costs.optimistic_seconds(batch_size, 0) - instead)

    def _settle(
        self, state: _BucketState, batch_size: int, plan: _StepPlan, emitted: float
    ) -> None:
        """Refill the time budgets and charge the step to the budget that covers it.

        Charges are computed from the updated estimates and not from the step's own time, as an
        outlier would have delayed a plain step too.
        """
        costs, budgets = self.costs, self.budgets
        plain_seconds, spent = costs.seconds(batch_size, 0), costs.seconds(batch_size, plan.size)
        budgets.refill(self.constants.refill_rate * spent)
        if plan.is_wasted and state.benefit > 0:
            # One of several lookups that save time together.
            budgets.loss -= self._draft_seconds(state, batch_size)
        elif plan.is_wasted:
            budgets.probe -= self._draft_seconds(state, batch_size)
        elif plan.is_trial and plan.size == 0:
            budgets.trial -= self._plain_loss(state, batch_size)
        elif plan.is_trial:
            best = costs.seconds(batch_size, state.size) / state.gain
            spent = min(spent, costs.optimistic_seconds(batch_size, plan.size))
            budgets.trial -= max(0.0, spent - plan.lowest * min(plain_seconds, best))
        elif plan.size > 0:
            budgets.loss += emitted * plain_seconds - spent
        budgets.clamp(plain_seconds, self.constants)
