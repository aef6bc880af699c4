"""Replays recorded steps through the planner, optionally with changed constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import ValidationError

from drafttree.arrays import FloatArray
from drafttree.budget.calibration import certainty
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import batch_bucket
from drafttree.budget.planner import Planner
from drafttree.budget.recording import RecordedPlanner, RecordedStep
from drafttree.budget.tree_choice import TreeChoice


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

    def add(self, choice: TreeChoice | None, tokens: float, seconds: float) -> None:
        """Add one step."""
        self.steps += 1
        self.drafted += choice is not None and choice.drafts
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
        choices: The choice in each recorded step; None where drafting was skipped.
        recorded: Throughput as measured.
        replayed: Throughput that the replayed planner's choices are expected to give.
        final: What is left of each allowance at the end, in steps.
        lowest: Lowest value of each allowance.
        rows: Rows of `StepReport` of the replayed planner.
    """

    choices: list[TreeChoice | None] = field(default_factory=list)
    recorded: Throughput = field(default_factory=Throughput)
    replayed: Throughput = field(default_factory=Throughput)
    final: dict[str, float] = field(default_factory=dict)
    lowest: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)


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


def allowances(planner: Planner) -> dict[str, float]:
    """What is left of a planner's allowances, in steps."""
    return {"probe": planner.probes.left, "trial": planner.trials.allowance.left}


@dataclass(frozen=True)
class _Drafts:
    """What a drafter told the planner of its drafts.

    Attributes:
        expected_tokens: `[R, S]`, tokens that each request is expected to emit at each size.
        scores: `[R, M]`, scores of the nodes if trees take them best first.
        extends: Whether some requests may have further nodes.
    """

    expected_tokens: FloatArray
    scores: FloatArray | None
    extends: bool = True

    @classmethod
    def of(cls, step: RecordedStep, planner: Planner) -> _Drafts:
        scores = step.score_array(planner.candidate_sizes[-1])
        if scores is not None:
            return cls(planner.expected_tokens(scores), scores, step.extends)
        return cls(np.array(step.expected_tokens, np.float32), None)

    def choose(self, planner: Planner, batch_size: int) -> TreeChoice:
        if self.scores is not None:
            return planner.choose_best_first(batch_size, self.scores, extends=self.extends)
        return TreeChoice(planner.choose(batch_size, self.expected_tokens))

    def outcome(
        self, planner: Planner, batch_size: int, choice: TreeChoice | None
    ) -> tuple[int, float]:
        """Rows and tokens that a planner predicts for a choice, without those of grammars."""
        nodes = choice.num_draft_tokens if choice else 0
        index = planner.candidate_sizes.index(nodes)
        tokens = planner.calibrate(self.expected_tokens)[:, index]
        rows = batch_size * (nodes + 1)
        if choice and choice.spine and self.scores is not None:
            further = self.scores[:, nodes : nodes + choice.spine]
            taken = further >= choice.min_score
            levels = certainty(self.expected_tokens, planner.candidate_sizes)
            ratios = planner.ratios(levels)[:, index]
            tokens = tokens + ratios * (further * taken).sum(1)
            rows += round(batch_size * float(taken.sum(1).mean()))
        return rows, batch_size * float(tokens.mean())


class _Replayer:
    """Runs a planner over recorded steps, beside a reference planner that repeats the recording.

    Where both decide alike, the step has the recorded outcome. Where they differ, its time and its
    tokens are those that the reference planner predicts from all steps so far.
    """

    def __init__(self, first: RecordedPlanner, constants: BudgetConstants) -> None:
        sizes, seconds = first.candidate_sizes, first.forward_seconds
        self._reference = Planner(sizes, seconds, first.constants)
        self._planner = Planner(sizes, seconds, constants)
        self._given: dict[int, _Drafts] = {}
        self.result = Replay()

    def run(self, steps: Sequence[RecordedStep]) -> Replay:
        result = self.result
        for step in steps:
            self._step(step)
            result.final = allowances(self._planner)
            result.lowest = {
                name: min(left, result.lowest.get(name, left))
                for name, left in result.final.items()
            }
        result.rows = self._planner.explain()
        return result

    def _step(self, step: RecordedStep) -> None:
        reference, batch_size = self._reference, step.batch_size
        reference.should_skip_drafting(batch_size)
        if step.choice is not None:
            given = _Drafts.of(step, reference)
            given.choose(reference, batch_size)
            self._given[batch_bucket(batch_size)] = given
        choice = None
        if not self._planner.should_skip_drafting(batch_size):
            choice = self._drafts(batch_size).choose(self._planner, batch_size)
        self.result.choices.append(choice)
        if step.seconds is not None:
            self._measure(step, step.seconds, choice)

    def _drafts(self, batch_size: int) -> _Drafts:
        """Drafts of this step, or of its bucket's last step if it was recorded without."""
        known = self._given.get(batch_bucket(batch_size))
        sizes = len(self._planner.candidate_sizes)
        return known or _Drafts(np.ones((batch_size, sizes), np.float32), None)

    def _measure(self, step: RecordedStep, seconds: float, choice: TreeChoice | None) -> None:
        reference, planner, batch_size = self._reference, self._planner, step.batch_size
        rows, tokens, draft_seconds = step.rows, step.emitted_tokens, step.draft_seconds
        added_rows, given_tokens = step.added_rows, step.given_tokens
        verified = step.verified if choice == step.choice else None
        recorded_seconds = seconds
        if choice != step.choice:
            rows, tokens = self._drafts(batch_size).outcome(reference, batch_size, choice)
            if choice is None:
                draft_seconds = 0.0
            elif not draft_seconds:
                draft_seconds = reference.mean_draft_seconds(batch_size)
            seconds = reference.costs.seconds(batch_size, rows, added_rows) + draft_seconds
            if given_tokens:
                # Grammars give as many for each token that they do not give.
                given_tokens *= tokens / (step.emitted_tokens - given_tokens)
            rows += added_rows
            tokens += given_tokens
        plain = TreeChoice(0)
        reference.record_step(
            batch_size,
            step.choice or plain,
            step.rows,
            recorded_seconds,
            step.draft_seconds,
            step.emitted_tokens,
            step.added_rows,
            step.given_tokens,
            step.verified,
        )
        planner.record_step(
            batch_size,
            choice or plain,
            rows,
            seconds,
            draft_seconds,
            tokens,
            added_rows,
            given_tokens,
            verified,
        )
        self.result.recorded.add(step.choice, step.emitted_tokens, recorded_seconds)
        self.result.replayed.add(choice, tokens, seconds)


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
