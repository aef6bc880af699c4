"""Chooses the shapes of trees that a model drafts some steps before they are verified.

Where drafts stay on the device and steps overlap, a step's shape is fixed before the outcomes of
the two or three steps before it have arrived. `ShapeController` lets a `ShapePlanner` choose then,
from what has arrived, in the place of `TierController`: the number of draft tokens names the shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from drafttree.budget.calibration import VerifiedDrafts
from drafttree.budget.draft_times import ReadTimes
from drafttree.budget.planner_state import ShapePlan
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.budget.step_report import MeasuredStep
from drafttree.budget.tier_controller import TierOutcome, TierPlan
from drafttree.budget.tier_explanation import TierChoice, TierUpdate
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape


@dataclass(frozen=True)
class ShapeTier(TierPlan):
    """A decision that a planner of shapes has made.

    Attributes:
        plan: The planner's decision.
    """

    plan: ShapePlan | None = None


class ShapeController:
    """Chooses one of a few shapes for the trees of each step, ahead of it.

    Call `choose` once for each step that is sent to the device, and `record` once for each step
    whose outputs have arrived, in the same order.

    Attributes:
        sizes: Numbers of draft tokens of the shapes, ascending from 0.
        planner: The planner that decides.
    """

    def __init__(self, planner: ShapePlanner) -> None:
        """Let a planner choose, which has seen no step yet."""
        self.planner = planner
        self.sizes = self.planner.costs.candidate_sizes
        self._reads = ReadTimes()
        self._unread = 0
        self._undrafted: set[Hashable] = set()
        self._trial_in_flight = False
        self._choice: TierChoice | None = None
        self._measured: list[MeasuredStep] = []

    def choose(self, requests: Sequence[Hashable], most: int) -> TierPlan:
        """Choose the trees that the next step verifies.

        Args:
            requests: Requests that it is going to have; at least one.
            most: Most draft tokens of a request for which there is room.
        """
        self._undrafted.intersection_update(requests)
        plan = self.planner.choose(
            len(requests),
            lambda: self._reads.usual(self._unread),
            drafted=len(requests) - len(self._undrafted),
            most=most,
            may_try=not self._trial_in_flight,
        )
        self._trial_in_flight |= plan.step.is_trial
        self._choice = self._explained(plan, len(requests), most)
        return ShapeTier(plan.shape.nodes, is_trial=plan.step.is_trial, plan=plan)

    def record(self, outcome: TierOutcome) -> None:
        """Learn from a step whose outputs have arrived."""
        tier, drafts, requests = outcome.plan, outcome.drafts, len(outcome.requests)
        if tier.is_trial:
            self._trial_in_flight = False
        if drafts is None:
            return
        self._reads.add(drafts.read_tokens, drafts.read_seconds)
        self._unread = drafts.unread
        plan = tier.plan if isinstance(tier, ShapeTier) else None
        if plan is None or not requests:
            return
        draft_tokens = (drafts.parents >= 0).sum(1)
        if plan.shape.depth:
            self._learn_acceptance(plan.shape, outcome)
            have_none = set(compress(outcome.requests, draft_tokens == 0))
            self._undrafted.difference_update(outcome.requests)
            self._undrafted |= have_none
        seconds = outcome.seconds
        if seconds is None or not 0 <= drafts.seconds < seconds - drafts.read_seconds:
            return
        self._measured.append(
            self.planner.record_step(
                plan,
                requests,
                outcome.rows,
                seconds - drafts.read_seconds,
                drafts.seconds,
                float(outcome.emitted.sum()),
                VerifiedDrafts(draft_tokens, outcome.emitted - 1),
                draft_tokens > 0,  # nothing is cut
                drafts.read_seconds,
            )
        )

    def forget(self, request: Hashable) -> None:
        """Take a request as one that is drafted for, until a step of it says otherwise."""
        self._undrafted.discard(request)

    def take_update(self) -> TierUpdate:
        """The choice that was made and the steps that were measured since the last call."""
        update = TierUpdate(self._choice, tuple(self._measured))
        self._choice = None
        self._measured.clear()
        return update

    def _learn_acceptance(self, shape: TreeShape, outcome: TierOutcome) -> None:
        assert outcome.drafts is not None
        parents, path = map(torch.from_numpy, (outcome.drafts.parents, outcome.drafts.path))
        # The tokens do not count.
        trees = DraftTree(parents, parents, (parents >= 0).sum(1).int() + 1)
        verified = Verified(path, path, (path >= 0).sum(1).int())
        self.planner.acceptance.add(shape, trees, verified)

    def _explained(self, plan: ShapePlan, requests: int, most: int) -> TierChoice | None:
        """Why a shape was chosen; None if nothing was weighed."""
        if plan.gains is None or plan.seconds is None:
            return None
        gains, seconds = plan.gains, plan.seconds
        wanted = int((gains / seconds).argmax())
        return TierChoice(
            size=plan.shape.nodes,
            reason=_reason(plan, is_limited=self.sizes[wanted] > most),
            requests=requests,
            most=most,
            gain=float(gains[plan.index] * seconds[0] / seconds[plan.index]),
            sizes=self.sizes,
            tokens=tuple(gains.tolist()),
            seconds=tuple(seconds.tolist()),
        )


def _reason(plan: ShapePlan, *, is_limited: bool) -> str:
    """Why a shape was chosen, as `TierChoice` names it."""
    if plan.step.is_trial:
        return "trial"
    if plan.at_stake is not None:
        return "explore"
    if is_limited:
        return "limit"
    return "best" if plan.shape.nodes else "rest"
