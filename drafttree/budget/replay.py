"""Replays recorded steps through the planner, optionally with changed constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import ValidationError

from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import batch_bucket
from drafttree.budget.planner import FloatArray, Planner
from drafttree.budget.recording import RecordedPlanner, RecordedStep
from drafttree.budget.time_budgets import TimeBudgets


@dataclass
class Throughput:
    """Sums over measured steps.

    Attributes:
        steps: Number of steps.
        drafted: Number of steps with drafts.
        tokens: Tokens emitted.
        seconds: Duration of all steps.
    """

    steps: int = 0
    drafted: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_draft_tokens: int, tokens: float, seconds: float) -> None:
        """Add one step."""
        self.steps += 1
        self.drafted += num_draft_tokens > 0
        self.tokens += tokens
        self.seconds += seconds

    @property
    def drafted_share(self) -> float:
        """Share of steps with drafts."""
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Replay:
    """The outcome of a replay.

    Attributes:
        choices: Draft tokens chosen in each recorded step; None where drafting was skipped.
        recorded: Throughput as measured.
        replayed: Throughput that the replayed planner's choices are expected to give.
        final: Time budgets at the end.
        lowest: Lowest value of each time budget.
        plain_seconds: Predicted seconds of a plain step at the end.
        rows: Rows of `StepReport` of the replayed planner.
    """

    choices: list[int | None] = field(default_factory=list)
    recorded: Throughput = field(default_factory=Throughput)
    replayed: Throughput = field(default_factory=Throughput)
    final: TimeBudgets = field(default_factory=TimeBudgets)
    lowest: TimeBudgets = field(default_factory=TimeBudgets)
    plain_seconds: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)


def recorded_choice(step: RecordedStep) -> int | None:
    """Draft tokens chosen in a recorded step; None where drafting was skipped."""
    return None if step.expected_tokens is None else step.num_draft_tokens


def changed_constants(constants: BudgetConstants, changes: Mapping[str, str]) -> BudgetConstants:
    """`constants` with some of them replaced; names in either case, values as text.

    Raises:
        ValueError: A name is unknown or a value out of range.
    """
    changed = {name.lower(): value for name, value in changes.items()}
    try:
        return BudgetConstants.model_validate({**constants.model_dump(), **changed})
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(BudgetConstants.model_fields)
            raise ValueError(f"{name} is not a constant of the node budget: use {known}") from error
        raise ValueError(f"{name}={changed.get(name)}: {problem['msg']}") from error


class _Replayer:
    """Runs a planner over recorded steps, beside a reference planner that repeats the recording.

    Where both decide alike, the step has the recorded outcome. Where they differ, its time and its
    tokens are those that the reference planner predicts from all steps so far.
    """

    def __init__(self, first: RecordedPlanner, constants: BudgetConstants) -> None:
        sizes, seconds = first.candidate_sizes, first.forward_seconds
        self._reference = Planner(sizes, seconds, first.constants)
        self._planner = Planner(sizes, seconds, constants)
        self._expected: dict[int, FloatArray] = {}
        self.result = Replay()

    def run(self, steps: Sequence[RecordedStep]) -> Replay:
        result = self.result
        for step in steps:
            self._step(step)
            budgets = self._planner.budgets
            if len(result.choices) == 1:
                result.lowest = TimeBudgets(budgets.probe, budgets.trial, budgets.loss)
            result.lowest = TimeBudgets(
                min(result.lowest.probe, budgets.probe),
                min(result.lowest.trial, budgets.trial),
                min(result.lowest.loss, budgets.loss),
            )
        result.final = self._planner.budgets
        result.rows = self._planner.explain()
        if steps:
            result.plain_seconds = self._planner.costs.seconds(steps[-1].batch_size, 0)
        return result

    def _step(self, step: RecordedStep) -> None:
        reference, batch_size = self._reference, step.batch_size
        given = step.expected_array()
        reference.should_skip_drafting(batch_size)
        if given is not None:
            reference.choose(batch_size, given)
            self._expected[batch_bucket(batch_size)] = given
        choice = self._choose(step)
        self.result.choices.append(choice)
        if step.seconds is not None:
            self._measure(step, step.seconds, choice)

    def _choose(self, step: RecordedStep) -> int | None:
        if self._planner.should_skip_drafting(step.batch_size):
            return None
        return self._planner.choose(step.batch_size, self._expected_tokens(step.batch_size))

    def _expected_tokens(self, batch_size: int) -> FloatArray:
        """Expected tokens of this step, or of its bucket's last step if it was recorded without."""
        known = self._expected.get(batch_bucket(batch_size))
        if known is not None:
            return known
        return np.ones((batch_size, len(self._planner.candidate_sizes)), np.float32)

    def _measure(self, step: RecordedStep, seconds: float, choice: int | None) -> None:
        reference, planner, batch_size = self._reference, self._planner, step.batch_size
        num_draft_tokens = choice or 0
        is_truncated = step.is_truncated and num_draft_tokens > 0
        tokens, draft_seconds = step.emitted_tokens, step.draft_seconds
        recorded_seconds = seconds
        if choice != recorded_choice(step) and not is_truncated:
            expected = self._expected_tokens(batch_size)
            index = planner.candidate_sizes.index(num_draft_tokens)
            mean = reference.calibrate(batch_size, expected).mean(0)
            tokens = batch_size * float(mean[index])
            if choice is None:
                draft_seconds = 0.0
            elif not draft_seconds:
                draft_seconds = reference.mean_draft_seconds(batch_size)
            seconds = reference.costs.seconds(batch_size, num_draft_tokens)
            if not num_draft_tokens:
                seconds += draft_seconds
        if step.is_truncated:
            reference.record_truncated_step(batch_size, recorded_seconds, step.emitted_tokens)
        else:
            reference.record_step(
                batch_size,
                step.num_draft_tokens,
                recorded_seconds,
                step.draft_seconds,
                step.emitted_tokens,
            )
        if is_truncated:
            planner.record_truncated_step(batch_size, seconds, tokens)
        else:
            planner.record_step(batch_size, num_draft_tokens, seconds, draft_seconds, tokens)
        self.result.recorded.add(step.num_draft_tokens, step.emitted_tokens, recorded_seconds)
        self.result.replayed.add(num_draft_tokens, tokens, seconds)


def replay(
    first: RecordedPlanner,
    steps: Sequence[RecordedStep],
    constants: BudgetConstants | None = None,
) -> Replay:
    """Replay recorded steps.

    Args:
        first: The recorded planner.
        steps: The recorded steps.
        constants: Constants to replay with; the recorded ones if None.
    """
    return _Replayer(first, constants or first.constants).run(steps)
