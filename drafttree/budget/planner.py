"""The planner: chooses the draft trees' sizes in each decode step.

The drafter predicts how many tokens a step emits at each candidate size, and the cost model
predicts how long the step takes. The planner corrects the first by the acceptance calibration and
takes the size with the lowest mean time per token over the requests of the batch. It decodes
plainly where drafting does not clearly win.

Tokens that a grammar makes certain or likely are drafted in every step, plain ones included. On
average each token of the model's own choice is followed by the same number of them, whatever the
size. So they multiply the tokens of all sizes by the same factor, and are left out: a plain step
emits one token, and what drafts add is measured without them. The time that they take counts.

The objective is not the throughput of the whole batch: a step takes equally long for all of its
requests, so a few requests whose drafts are accepted would slow down all others, and the batch
would hardly finish earlier.

Nothing but these predictions keeps the planner from drafting, and both follow what is measured. A
size that may be better than its prediction is tried now and then, see `Trials`.

The planner is deterministic: measured times and outcomes are arguments of its methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from drafttree.arrays import FloatArray, LongArray
from drafttree.budget.allowance import Allowance
from drafttree.budget.calibration import AcceptanceCalibration, VerifiedDrafts, certainty
from drafttree.budget.candidates import best_size, checked_sizes, drafted
from drafttree.budget.constants import BudgetConstants
from drafttree.budget.costs import CostModel, batch_bucket
from drafttree.budget.planner_state import BucketState, Outlook, StepPlan
from drafttree.budget.spine import worthwhile_spine
from drafttree.budget.step_report import MeasuredStep, StepReport
from drafttree.budget.tree_choice import TreeChoice
from drafttree.budget.trials import Trials

_MOST_UNRECORDED = 32
"""Steps without a recorded one after which nothing is tried, as nothing would be learned."""


class Planner:
    """Chooses one of a few candidate sizes for each decode step, and further nodes for some trees.

    Before each step call `should_skip_drafting`. If it returns False, look up drafts and call
    `choose` or `choose_best_first`. After the step, and before the next one, call `record_step`, or
    where steps overlap one or more steps later; a step for which it is not called is ignored.

    Attributes:
        candidate_sizes: Numbers of draft tokens to choose from, ascending from 0.
        costs: The cost model.
        trials: Decides on steps that are taken only to measure a size.
        probes: Allowance for looking up drafts that are not used.
        report: What was predicted of the steps, and measured.
    """

    def __init__(
        self,
        candidate_sizes: Sequence[int],
        forward_seconds: Mapping[int, float],
        constants: BudgetConstants | None = None,
        *,
        late: int = 0,
    ) -> None:
        """Plan from forwards that were measured at start-up.

        Args:
            candidate_sizes: Numbers of draft tokens to choose from, ascending from 0.
            forward_seconds: Seconds of a forward by the number of its tokens.
            constants: Tuned constants; the defaults if None.
            late: How many further steps are chosen before a step is recorded.

        Raises:
            ValueError: The sizes do not start at 0 or do not ascend, or `forward_seconds` is
                empty or not positive.
        """
        self.candidate_sizes = checked_sizes(candidate_sizes)
        self.constants = constants or BudgetConstants()
        self.costs = CostModel(candidate_sizes, forward_seconds, self.constants)
        self.trials = Trials(self.costs, self.constants)
        self.probes = Allowance(self.constants.learning_share, self.constants.probe_capacity)
        self._calibration = AcceptanceCalibration(self.candidate_sizes, self.constants)
        self.report = StepReport()
        self._states: dict[int, BucketState] = {}
        self._plans: deque[StepPlan] = deque(maxlen=1 + late)
        self._unrecorded = 0

    def should_skip_drafting(self, batch_size: int) -> bool:
        """Whether the next step is plain and drafts need not be looked up for it."""
        self._unrecorded += 1
        state = self._state(batch_size)
        if not self._should_skip(state, batch_size):
            return False
        state.is_tried = state.index > 0
        if not state.is_tried:
            state.expect(1.0, self.costs.seconds(batch_size, batch_size))
        self._plans.append(StepPlan(TreeChoice(0), is_trial=state.is_tried))
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
        return self._choose(batch_size, expected_tokens).num_draft_tokens

    def choose_best_first(
        self, batch_size: int, scores: FloatArray, *, extends: bool = True
    ) -> TreeChoice:
        """Choose the trees of the next step, which take their nodes best first.

        Args:
            batch_size: Number of requests in the step.
            scores: `[R, M]`, the probability that each node is accepted, the best first, for M the
                largest candidate size.
            extends: Whether some requests may have further nodes.

        Raises:
            ValueError: `scores` does not have M columns.
        """
        most = self.candidate_sizes[-1]
        if scores.shape[1] != most:
            raise ValueError(
                f"scores has {scores.shape[1]} columns: give one for each of the {most} nodes of "
                "the largest size"
            )
        return self._choose(batch_size, self.expected_tokens(scores), scores, extends=extends)

    def expected_tokens(self, scores: FloatArray) -> FloatArray:
        """Tokens expected at each candidate size, `[R, S]`, of trees that take nodes best first."""
        expected = np.ones((len(scores), len(self.candidate_sizes)), np.float32)
        sums = np.cumsum(scores, 1)
        expected[:, 1:] += sums[:, [size - 1 for size in self.candidate_sizes[1:]]]
        return expected

    def record_step(
        self,
        batch_size: int,
        choice: TreeChoice,
        rows: int,
        seconds: float,
        draft_seconds: float,
        emitted_tokens: float,
        added_rows: int = 0,
        given_tokens: float = 0.0,
        verified: VerifiedDrafts | None = None,
    ) -> None:
        """Learn from a step.

        Args:
            batch_size: Number of its requests.
            choice: The trees that were chosen.
            rows: Tokens that were verified, roots included; fewer than chosen if trees were cut.
            seconds: Duration of the whole step.
            draft_seconds: Part of it that was spent looking up drafts.
            emitted_tokens: Tokens emitted for the whole batch.
            added_rows: Part of the rows that grammars have added.
            given_tokens: Part of the emitted tokens that grammars make certain or likely.
            verified: The drafts of each request; None if only their sum is known, so that each
                is taken for the mean.
        """
        self._unrecorded = 0
        state, costs = self._state(batch_size), self.costs
        bucket, plan = batch_bucket(batch_size), None
        chosen_rows, own_tokens = rows - added_rows, emitted_tokens - given_tokens
        if len(self._plans) == self._plans.maxlen:
            plan = self._plans.popleft()
        if plan is None or plan.choice != choice:
            own = own_tokens / batch_size
            plan = StepPlan(choice, own, own, own)
        predicted = costs.seconds(batch_size, chosen_rows, added_rows)
        predicted += state.draft_seconds if draft_seconds else 0
        if draft_seconds > 0:
            plain_seconds = costs.seconds(batch_size, batch_size)
            state.learn_draft_seconds(draft_seconds, plain_seconds, self.constants)
        # What delays a lookup now and then is a stall of a step with drafts.
        lookup = draft_seconds
        if chosen_rows > batch_size:
            lookup = min(lookup, state.draft_seconds)
        if costs.observe(batch_size, chosen_rows, seconds - lookup, added_rows):
            self.trials.allowance.renew()
        expected_tokens = plan.calibrated * batch_size
        if choice.drafts:
            if verified is None:
                levels, drafts = plan.of_mean(batch_size)
                accepted = np.full(batch_size, own_tokens / batch_size - 1)
            else:
                whole, levels, drafts = plan.of_whole_trees(verified.draft_tokens)
                accepted = verified.accepted[whole]
                ratio = (plan.calibrated - 1) / (plan.expected - 1) if plan.expected > 1 else 1.0
                of_cut = float(verified.accepted[~whole].sum())
                expected_tokens = batch_size + ratio * float(drafts.sum()) + of_cut
            self._calibration.add(levels, choice.num_draft_tokens, drafts, accepted, costs.clock)
        self._settle(state, batch_size, plan, seconds)
        self.report.add(
            MeasuredStep(
                bucket=bucket,
                num_draft_tokens=choice.num_draft_tokens,
                batch_size=batch_size,
                rows=rows,
                predicted_seconds=predicted,
                seconds=seconds,
                expected_tokens=expected_tokens + given_tokens,
                emitted_tokens=emitted_tokens,
                is_trial=plan.is_trial,
                is_wasted=plan.is_wasted,
            )
        )

    def calibrate(self, expected_tokens: FloatArray) -> FloatArray:
        """Correct expected tokens, `[R, S]`, by the ratio of accepted to expected drafts."""
        levels = certainty(expected_tokens, self.candidate_sizes)
        return self._calibration.calibrate(expected_tokens, levels, self.costs.clock)

    def ratios(self, levels: LongArray) -> FloatArray:
        """The ratio of accepted to expected draft tokens at each size, `[R, S]`.

        Args:
            levels: `[R]`, how certain the drafts of each request are; see `certainty`.
        """
        return self._calibration.ratios(levels, self.costs.clock)

    def outlook(self, batch_size: int) -> Outlook:
        """What the steps that are chosen for a batch are expected to give, in the mean."""
        plain = Outlook(1.0, self.costs.seconds(batch_size, batch_size))
        return self._state(batch_size).outlook or plain

    def mean_draft_seconds(self, batch_size: int) -> float:
        """Mean seconds of looking up drafts for a batch."""
        return self._state(batch_size).draft_seconds

    def explain(self) -> list[dict[str, float]]:
        """Predictions and measurements by batch bucket and size; see `StepReport.rows`."""
        return self.report.rows()

    def _state(self, batch_size: int) -> BucketState:
        return self._states.setdefault(batch_bucket(batch_size), BucketState())

    def _step_seconds(self, state: BucketState, batch_size: int) -> FloatArray:
        """Predicted mean seconds at each size, with the time of looking up drafts, `[S]`."""
        seconds = self.costs.of_sizes(batch_size)
        seconds[1:] += state.draft_seconds
        return seconds

    def _should_skip(self, state: BucketState, batch_size: int) -> bool:
        seconds = self._step_seconds(state, batch_size)
        if state.index == 0:
            return state.benefit <= 0 and not self.probes.covers(state.draft_seconds / seconds[0])
        # The gain is that of an earlier step; only new drafts tell what drafting gains now.
        return (
            self._may_try
            and not state.is_tried
            and self.trials.wants_plain(batch_size, state.index, state.gain, seconds)
        )

    def _choose(
        self,
        batch_size: int,
        expected_tokens: FloatArray,
        scores: FloatArray | None = None,
        *,
        extends: bool = False,
    ) -> TreeChoice:
        sizes = self.candidate_sizes
        if expected_tokens.shape[1] != len(sizes):
            raise ValueError(
                f"expected_tokens has {expected_tokens.shape[1]} columns: give one for each of "
                f"the {len(sizes)} candidate sizes"
            )
        state = self._state(batch_size)
        state.is_tried = False
        levels = certainty(expected_tokens, sizes)
        calibrated = self._calibration.calibrate(expected_tokens, levels, self.costs.clock)
        # `mean` takes twice as long as `sum` for so few numbers.
        count = len(expected_tokens)
        expected, mean = expected_tokens.sum(0) / count, calibrated.sum(0) / count
        gains, lowest = 1 / ((1 / calibrated).sum(0) / count), calibrated.min(0)
        seconds = self._step_seconds(state, batch_size)
        best, rates = best_size(gains, expected, seconds, self.constants.margin)
        index, is_trial = best, False
        if self._may_try and not self._is_trial_under_way():
            trial = self.trials.size(batch_size, best, gains, lowest, rates)
            if trial is not None:
                index, is_trial = trial, True
        choice, taken = TreeChoice(sizes[index]), float(seconds[index])
        plan = StepPlan(
            choice,
            float(expected[index]),
            float(mean[index]),
            float(gains[index]),
            float(lowest[index]),
            is_trial=is_trial,
            is_wasted=index == 0,
            levels=levels,
        )
        if scores is not None and extends and not is_trial:
            size, ratios = sizes[index], self.ratios(levels)[:, index]
            spine = worthwhile_spine(
                scores[:, size:],
                calibrated[:, index],
                [larger - size for larger in sizes[index + 1 :]],
                ratios,
                batch_size,
                batch_size * (size + 1),
                lambda rows: state.draft_seconds + self.costs.seconds(batch_size, rows),
                self.constants.margin,
                float(rates[0]),
            )
            if spine is not None:
                choice, taken = TreeChoice(size, spine.nodes, spine.min_score), spine.seconds
                further = spine.tokens - calibrated[:, index]
                plan = replace(
                    plan,
                    choice=choice,
                    expected=plan.expected + float((further / ratios).mean()),
                    calibrated=float(spine.tokens.mean()),
                    gain=1 / float((1 / spine.tokens).mean()),
                    is_wasted=False,
                )
        if scores is not None:
            proposed, drafts = drafted(scores, choice)
            plan = replace(plan, proposed=proposed, drafts=drafts)
        state.index, state.gain = best, float(gains[best])
        if is_trial:
            state.expect(state.gain, float(seconds[best]))
        else:
            taken += state.draft_seconds if plan.is_wasted else 0.0
            saved = plan.gain - taken / float(seconds[0])
            state.benefit += self.constants.smoothing * (saved - state.benefit)
            state.expect(plan.gain, taken)
        self._plans.append(plan)
        return choice

    @property
    def _may_try(self) -> bool:
        """Whether steps are recorded, so that trials are charged and teach something."""
        return self._unrecorded <= _MOST_UNRECORDED

    def _is_trial_under_way(self) -> bool:
        """Whether the outcome of a trial is still to come, where outcomes are late."""
        return self._plans.maxlen != 1 and any(plan.is_trial for plan in self._plans)

    def _settle(self, state: BucketState, batch_size: int, plan: StepPlan, seconds: float) -> None:
        """Refill the allowances, and charge the step to the one that it used.

        A trial costs the predicted mean of its size, or the step's own time if that is less: a
        stall would have delayed the step of another size too.
        """
        self.trials.allowance.refill()
        self.probes.refill()
        if plan.is_wasted and state.benefit <= 0:
            plain_seconds = self.costs.seconds(batch_size, batch_size)
            self.probes.charge(state.draft_seconds / plain_seconds)
        elif plan.is_trial:
            index = self.candidate_sizes.index(plan.choice.num_draft_tokens)
            means = self._step_seconds(state, batch_size)
            spent = min(seconds, self.trials.seconds(batch_size, index, state.index, means))
            self.trials.charge(spent / float(means[state.index]), state.gain, plan.lowest)
