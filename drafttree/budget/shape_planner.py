"""The planner for drafters that ask a model for their drafts: chooses the shape of a step's trees.

A model drafts one level after another, so that depth costs time before anything is verified, and
rows cost time after it. Two things differ from `Planner`. A tree's worth must be known before it
is drafted, so it is predicted from what was accepted lately, by level and rank. And a model has to
read the text before it can draft: while nothing is drafted it may fall behind, and what it takes to
catch up is part of the price of drafting again.

Where there are drafts that need no model too, a `Planner` of their own chooses how many of them are
verified. Steps without the model are then its steps, plain ones or with those drafts, and the model
is asked only if that gives more tokens in the same time.

Some requests of a step may be served without drafts. They emit one token each, and wait for what is
drafted for the others. As in `Planner`, the best shape has the least mean time per token over all
requests. So a share s of requests that gain g tokens each counts as a gain of 1 / (1 - s + s / g).

**Lossless.** A shape is chosen between two steps, from outcomes and times of earlier steps, the
number of requests, and how many of them are drafted for. Nothing drawn in a step takes part in the
choice of its shape: given what came before, the shape is a constant, and recursive rejection and
traversal leave the target's distribution for each constant shape. (A choice by the drafts that were
drawn, such as dropping those that look improbable, would bias the distribution of those that are
left.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from drafttree.arrays import BoolArray, FloatArray
from drafttree.budget.calibration import AcceptanceCalibration, VerifiedDrafts
from drafttree.budget.candidates import checked_sizes
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import CostModel, batch_bucket
from drafttree.budget.draft_times import DraftTimes
from drafttree.budget.exploration import Exploration
from drafttree.budget.level_acceptance import NO_DRAFTS, LevelAcceptance
from drafttree.budget.planner import Planner
from drafttree.budget.planner_state import BucketState, Outlook, ShapePlan, StepPlan
from drafttree.budget.step_report import MeasuredStep, StepReport
from drafttree.budget.tree_choice import TreeChoice
from drafttree.budget.trials import Trials
from drafttree.tree_shape import TreeShape

_CALIBRATION_AGE = 256
"""As for `LevelAcceptance`: while nothing is drafted, texts change."""
_EVIDENCE = 8.0
"""Number of outcomes below which it is unknown whether drafting pays."""
_READ_AHEAD = 128
"""Steps with drafts that what was missed is read for."""
_RESTS = 8
"""Plain steps from one decision to the next while nothing is drafted. Estimates hardly change then,
and a decision takes up to 3% of a small model's step."""
_DRAFTED_STEPS = 4
"""Steps with drafts from one decision to the next; a step that measures or explores is decided by
itself, and so is the one after it."""
_PLAIN = StepPlan(TreeChoice(0))


class _Requests(NamedTuple):
    """The requests of a step.

    Attributes:
        number: How many there are.
        drafted: For how many of them there are drafts; at least one.
    """

    number: int
    drafted: int

    @property
    def share(self) -> float:
        """The share of those that are drafted for."""
        return self.drafted / self.number


@dataclass
class _Kept:
    """A decision that holds in some more steps.

    Attributes:
        plan: The decision.
        requests: The requests for which it was made.
        steps: In how many more steps it holds.
    """

    plan: ShapePlan
    requests: _Requests
    steps: int

    def take(self, requests: _Requests, most: int | None) -> ShapePlan | None:
        """The decision for the next step, which is then counted; None if it does not hold there.

        Args:
            requests: The step's requests.
            most: As in `ShapePlanner.choose`.
        """
        is_too_large = most is not None and self.plan.shape.nodes > most
        if not self.steps or requests != self.requests or is_too_large:
            return None
        self.steps -= 1
        return self.plan


class ShapePlanner:
    """Chooses one of a few tree shapes for each decode step.

    Before each step call `choose`, and after it `record_step`, which may be some steps later. A
    step for which it is not called is ignored. The planner is deterministic: measured times and
    outcomes are arguments of its methods.

    Attributes:
        shapes: The shapes to choose from, by number of draft tokens; the first has none.
        costs: The cost model of a step without drafting.
        draft_times: How long drafting takes.
        acceptance: What was accepted lately.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        forward_seconds: Mapping[int, float],
        *,
        base: Planner | None = None,
        pads_trees: bool = False,
    ) -> None:
        """Plan from forwards of the target that were measured at start-up.

        Args:
            shapes: Shapes with drafts, by number of draft tokens, no two with the same number.
            forward_seconds: Seconds of a forward of the target by the number of its tokens.
            base: Chooses and records the steps without the model's drafts; None if they are plain.
            pads_trees: Whether a step verifies as many rows of each request as of the largest tree,
                those without drafts included.

        Raises:
            ValueError: The shapes do not ascend, or `forward_seconds` is empty or not positive.
        """
        self.constants = BudgetConstants()
        self.shapes = (NO_DRAFTS, *shapes)
        sizes = checked_sizes([shape.nodes for shape in self.shapes])
        self._depths = [shape.depth for shape in self.shapes]
        self.costs = CostModel(sizes, forward_seconds, self.constants)
        self.draft_times = DraftTimes()
        self.acceptance = LevelAcceptance(
            max(shape.depth for shape in self.shapes), max(shape.width for shape in self.shapes)
        )
        self._trials = Trials(self.costs, self.constants)
        aged = self.constants.model_copy(update={"age_memory": _CALIBRATION_AGE})
        self._calibration = AcceptanceCalibration(self.costs.candidate_sizes, aged)
        self._base = base
        self._pads_trees = pads_trees
        self._report = StepReport() if base is None else base.report
        self._states: dict[int, BucketState] = {}
        self._exploration = Exploration()
        self._rests = 0
        self._kept: _Kept | None = None

    def choose(
        self,
        batch_size: int,
        catch_up_seconds: Callable[[], float] = lambda: 0.0,
        *,
        drafted: int | None = None,
        most: int | None = None,
        may_try: bool = True,
        learn: Callable[[], None] = lambda: None,
    ) -> ShapePlan:
        """Choose the shape of a step's trees, or keep to one that was chosen for several steps.

        Args:
            batch_size: Number of requests in the step.
            catch_up_seconds: What the model would need to read before it can draft. Asked for
                only if drafts are considered.
            drafted: For how many requests there may be drafts; None for all. The others are served
                without.
            most: Most draft tokens of a request for which there is room; None for any number.
            may_try: Whether the step may be taken only to measure a shape. It may not while the
                outcome of such a step is unknown.
            learn: Called before a new decision is made. Until then `record_step` need not be called
                for the steps since the last one.
        """
        if drafted == 0:
            return self._planned(0)
        requests = _Requests(batch_size, drafted or batch_size)
        state = self._state(batch_size)
        if not state.index and self._rests:
            self._rests -= 1
            return self._planned(0)
        if self._kept is not None and (plan := self._kept.take(requests, most)) is not None:
            return plan
        self._kept = None
        learn()
        seconds = self._step_seconds(requests)
        is_plain = self._base is None
        if state.index and may_try and is_plain and self._wants_plain(state, batch_size, seconds):
            state.is_tried = True
            plain = StepPlan(TreeChoice(0), is_trial=True)
            return self._planned(0, plain, requests.share, seconds=seconds)
        state.is_tried = False
        if not state.index and self._exploration.is_spent and not self._is_known:
            return self._rest()
        expected = self.acceptance.expected_tokens(self.shapes)
        calibrated = self._calibrated(batch_size, expected)
        gains = self._gains(requests, calibrated)
        fits = np.array(self.costs.candidate_sizes) <= (math.inf if most is None else most)
        rates = np.where(fits, gains / seconds, 0.0)
        best = int(rates.argmax())
        # Drafting goes on while it does not lose, so that it does not end by chance.
        least = 1.0 if state.index else self.constants.margin
        if rates[best] <= least * rates[0]:
            best = 0
        if best and not state.index:
            # The model first reads what it has missed.
            first = float(seconds[best]) + catch_up_seconds() / _READ_AHEAD
            if not self._is_known or gains[best] <= least * rates[0] * first:
                best = 0
        index, is_trial, at_stake = best, False, None
        if not best:
            explored = self._explored(requests, seconds, fits, catch_up_seconds)
            if explored is not None:
                index, at_stake = explored
        elif may_try:
            lowest = gains if requests.share == 1 else np.ones_like(gains)
            trial = self._trials.size(batch_size, best, gains, lowest, rates)
            index, is_trial = (best, False) if trial is None else (trial, True)
        state.index, state.gain = best, float(gains[best])
        if not index:
            return self._rest(gains, seconds)
        gain = float(gains[index])
        planned = StepPlan(
            TreeChoice(self.shapes[index].nodes),
            expected=float(expected[index]),
            calibrated=float(calibrated[index]),
            gain=gain,
            lowest=gain if requests.share == 1 else 1.0,
            is_trial=is_trial,
        )
        plan = self._planned(index, planned, requests.share, at_stake, gains, seconds)
        if best and may_try and not is_trial and fits.all():
            self._kept = _Kept(plan, requests, _DRAFTED_STEPS - 1)
        return plan

    def _explored(
        self,
        requests: _Requests,
        seconds: FloatArray,
        fits: BoolArray,
        catch_up_seconds: Callable[[], float],
    ) -> tuple[int, float] | None:
        """A shape to draft with to see whether drafting pays; None for none.

        Returns:
            Its index, and what it loses if nothing is accepted, in tokens of a request.
        """
        constants, exploration = self.constants, self._exploration
        batch_size = requests.number
        hopeful = self._gains(
            requests,
            self._calibrated(
                batch_size, self.acceptance.expected_tokens(self.shapes, constants.optimism)
            ),
        )
        deviations = self.costs.deviations(batch_size, 0)
        least = self.costs.seconds(batch_size, batch_size)
        rates = hopeful / np.maximum(seconds * np.exp(-constants.optimism * deviations), least)
        rates[~fits] = 0.0
        index = 1 + int(rates[1:].argmax())
        if not fits[index]:
            return None
        if not exploration.can_try_hopeless and rates[index] <= constants.margin * rates[0]:
            return None
        if self._is_known:
            exploration.end_credit()
        reading = catch_up_seconds() * float(rates[0])
        alone = float(seconds[index]) - self._state(batch_size).reading
        loss = alone * float(rates[0]) + reading - 1
        return (index, loss) if exploration.pay(loss, reading) else None

    def record_step(
        self,
        plan: ShapePlan,
        batch_size: int,
        rows: int,
        seconds: float,
        draft_seconds: float,
        emitted: float,
        verified: VerifiedDrafts,
        whole: BoolArray,
        catch_up_seconds: float = 0.0,
    ) -> MeasuredStep:
        """Learn from a step.

        Args:
            plan: What was chosen for it.
            batch_size: Number of its requests.
            rows: Tokens that were verified, roots included; fewer than chosen if trees were cut.
            seconds: Duration of the whole step, without catching up.
            draft_seconds: Part of it that was spent drafting.
            emitted: Tokens emitted for the whole batch.
            verified: The drafts of each request.
            whole: `[B]`, whether each request's tree was verified as it was drafted. It may have
                fewer nodes than its shape.
            catch_up_seconds: What it took to read what the model had missed.

        Returns:
            What was predicted and measured, which `explain` sums up too.
        """
        index, step = plan.index, plan.step
        if rows == batch_size:
            index = 0  # at the end of all answers, for example, nothing is drafted after all
        shape, costs = self.shapes[index], self.costs
        without = self._without_model(batch_size)
        requests = _Requests(batch_size, round(plan.share * batch_size))
        means = self._step_seconds(requests) if step.is_trial else None
        predicted = costs.seconds(batch_size, rows) + self._draft_seconds(batch_size, shape.depth)
        # The base counts the time of its own drafts apart, too.
        drafting, delay, warm = (0.0 if self._base is None else draft_seconds), 0.0, True
        if shape.depth:
            warm = self.draft_times.warm(shape.depth + 1)
            counted = self.draft_times.add(
                batch_size, shape.depth + 1, draft_seconds, without.seconds
            )
            delay = draft_seconds - counted
            # What delays a draft now and then is a stall of a step with drafts.
            usual = self._draft_seconds(batch_size, shape.depth)
            drafting = min(draft_seconds, usual) if warm else draft_seconds
        verifying = max(seconds - drafting, 1e-9)
        if costs.observe(batch_size, rows, verifying):
            self._trials.allowance.renew()
        if index and self._base is not None:
            self._base.costs.observe(batch_size, rows, verifying)
        if index and (count := int(whole.sum())):
            self._calibration.add(
                np.full(count, batch_bucket(batch_size)),
                shape.nodes,
                np.full(count, step.expected - 1),
                verified.accepted[whole],
                costs.clock,
            )
        self.acceptance.pass_step()
        self._trials.allowance.refill()
        if plan.at_stake is not None:
            # A long delay says nothing of the steps that follow.
            spent = (seconds - delay + catch_up_seconds) * without.tokens / without.seconds
            self._exploration.settle(plan.at_stake, spent, _gain_of(verified), warm=warm)
        state = self._state(batch_size)
        if not state.index:
            self._exploration.refill(without.tokens)
            state.rest()
        elif shape.depth and plan.at_stake is None:
            state.read(catch_up_seconds)
        if means is not None:
            spent = min(seconds, float(means[index])) / float(means[state.index])
            self._trials.charge(spent, state.gain, step.lowest)
        measured = MeasuredStep(
            bucket=batch_bucket(batch_size),
            num_draft_tokens=shape.nodes,
            batch_size=batch_size,
            rows=rows,
            predicted_seconds=predicted,
            seconds=seconds,
            expected_tokens=batch_size * (1 + plan.share * (step.calibrated - 1)),
            emitted_tokens=emitted,
            is_trial=step.is_trial,
            is_wasted=False,
        )
        if index or self._base is None:
            self._report.add(measured)
        return measured

    def reset(self) -> None:
        """Forget what was accepted; drafting may be tried again as at first."""
        self.acceptance.reset()
        self._exploration.renew()
        self._rests = 0
        self._kept = None

    def explain(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and size; see `StepReport.rows`.

        Those of the base are among them.
        """
        return self._report.rows()

    @property
    def _is_known(self) -> bool:
        """Whether there are enough outcomes, and a time of drafting, to say whether it pays."""
        return self.draft_times.is_known and self.acceptance.evidence >= _EVIDENCE

    def _rest(
        self, gains: FloatArray | None = None, seconds: FloatArray | None = None
    ) -> ShapePlan:
        self._rests, self._kept = _RESTS - 1, None
        return self._planned(0, gains=gains, seconds=seconds)

    def _planned(
        self,
        index: int,
        step: StepPlan = _PLAIN,
        share: float = 1.0,
        at_stake: float | None = None,
        gains: FloatArray | None = None,
        seconds: FloatArray | None = None,
    ) -> ShapePlan:
        return ShapePlan(self.shapes[index], index, step, share, at_stake, gains, seconds)

    def _state(self, batch_size: int) -> BucketState:
        return self._states.setdefault(batch_bucket(batch_size), BucketState())

    def _without_model(self, batch_size: int) -> Outlook:
        """What a step without the model's drafts is expected to give."""
        if self._base is None:
            return Outlook(1.0, self.costs.seconds(batch_size, batch_size))
        return self._base.outlook(batch_size)

    def _draft_seconds(self, batch_size: int, depth: int) -> float:
        """Usual seconds of drafting: one forward for the roots, and one for each level."""
        return self.draft_times.usual(batch_size, depth + 1) if depth else 0.0

    def _step_seconds(self, requests: _Requests) -> FloatArray:
        """Predicted mean seconds of a step with each shape, drafting included, `[S]`."""
        batch_size, costs = requests.number, self.costs
        depths = range(1 + max(self._depths))
        drafting = np.array([self._draft_seconds(batch_size, depth) for depth in depths])
        if self._pads_trees or requests.share == 1:
            seconds = costs.of_sizes(batch_size)
        else:
            rows = [batch_size + requests.drafted * size for size in costs.candidate_sizes]
            seconds = np.array([costs.seconds(batch_size, each) for each in rows])
        seconds += drafting[self._depths]
        seconds[1:] += self._state(batch_size).reading
        seconds[0] = self._without_model(batch_size).seconds
        return seconds

    def _calibrated(self, batch_size: int, expected: FloatArray) -> FloatArray:
        """Tokens of a request that is drafted for, with each shape, `[S]`."""
        calibrated: FloatArray = self._calibration.calibrate(
            expected[None], np.array([batch_bucket(batch_size)]), self.costs.clock
        )[0]
        return calibrated

    def _gains(self, requests: _Requests, tokens: FloatArray) -> FloatArray:
        """The same in the harmonic mean over all requests of a step, `[S]`."""
        gains: FloatArray = _harmonic_mean(requests.share, tokens)
        gains[0] = self._without_model(requests.number).tokens
        return gains

    def _wants_plain(self, state: BucketState, batch_size: int, seconds: FloatArray) -> bool:
        return not state.is_tried and self._trials.wants_plain(
            batch_size, state.index, state.gain, seconds
        )


T = TypeVar("T", float, FloatArray)


def _harmonic_mean(share: float, tokens: T) -> T:
    """Tokens of a request if a share of them emits `tokens` each, and the others one."""
    return 1 / (1 - share + share / tokens)


def _gain_of(verified: VerifiedDrafts) -> float:
    """Tokens of a request in the harmonic mean; those with drafts count at the mean of theirs."""
    drafted = verified.draft_tokens > 0
    if not drafted.any():
        return 1.0
    tokens = 1 + float(verified.accepted[drafted].mean())
    return _harmonic_mean(float(drafted.mean()), tokens)
