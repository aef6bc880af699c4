"""The steps between the scheduler's decisions and their outcomes.

The scheduler decides on the trees of the step after the one that it schedules, and outputs arrive
when one or two more steps have been scheduled. `TierSteps` keeps the decisions in that order,
measures the steps from one arrival to the next, and tells the controller what came of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from drafttree.budget.shape_controller import ShapeController
from drafttree.budget.tier_controller import TierController, TierOutcome, TierPlan
from drafttree.budget.tier_explanation import TierUpdate
from drafttree.vllm import patches
from drafttree.vllm.v2.tier_report import ShapeReport, TierReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class TierSteps:
    """Chooses the tier of each step, in the place of vLLM's table from batch sizes to tiers.

    Args:
        table: vLLM's table, indexed by the number of requests: the most draft tokens of each, so
            that all running requests fit in a step.
        running: The requests that the next step may have.
        clock: Time in seconds.
    """

    def __init__(
        self,
        table: Sequence[int],
        running: Callable[[], Sequence[str]],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._table = table
        self._running = running
        self._clock = clock
        self._controller: TierController | ShapeController | None = None
        self._chosen = TierPlan(0)
        self._coming = TierPlan(0)
        self._sent: deque[TierPlan] = deque()
        self._untimed = 0
        # How many steps under way have requests that belong to their turns before.
        self._former: dict[str, int] = {}
        self._began = clock()

    def __getitem__(self, num_requests: int) -> int:
        """The draft tokens of each request of the step after this one; the scheduler asks once."""
        if self._controller is None:
            return 0
        requests = self._running()
        most = self._table[max(num_requests, min(len(requests), len(self._table) - 1))]
        self._chosen = self._controller.choose(requests, most)
        return self._chosen.size

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up after the step that was scheduled last.

        They may be looked up without any being verified, to see whether they would help.
        """
        return self._coming.looks_up

    def before_schedule(self) -> None:
        """Start the clock anew if the engine had nothing to do until now.

        Steps that are still under way then were scheduled before their requests' ends were known.
        """
        if not self._running():
            self.restart_clock()

    def restart_clock(self) -> None:
        """Measure the steps that are scheduled from now on.

        The outputs of those still under way wait until the engine is called again, so their times
        mean nothing.
        """
        self._untimed = len(self._sent)
        self._began = self._clock()

    def scheduled(self, output: SchedulerOutput) -> None:
        """Note that a step was scheduled."""
        self._sent.append(self._coming)
        if output.total_num_scheduled_tokens:
            self._coming = self._chosen

    def arrived(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Report the outcome of a step, whose output has arrived, to the controller."""
        plan = self._sent.popleft()
        is_timed = not self._untimed
        self._untimed = max(self._untimed - 1, 0)
        former = {*self._former}
        self._former = {name: count - 1 for name, count in self._former.items() if count > 1}
        if not scheduled.total_num_scheduled_tokens:
            return
        began, self._began = self._began, self._clock()
        report: TierReport | ShapeReport | None = patches.report_of(output)
        if self._controller is None:
            if report is not None:
                self._controller = report.make_controller()
            return
        seconds = self._began - began if is_timed else 0.0
        self._controller.record(_outcome(plan, scheduled, output, report, seconds, former))

    def forget(self, request: str) -> None:
        """Forget what depends on a request's parameters, which its next turn may change."""
        if isinstance(self._controller, ShapeController):
            self._controller.forget(request)
        if self._sent:
            self._former[request] = len(self._sent)

    def take_update(self) -> TierUpdate | None:
        """What there is to explain since the last call; None before the first choice."""
        return None if self._controller is None else self._controller.take_update()


def _outcome(
    plan: TierPlan,
    scheduled: SchedulerOutput,
    output: ModelRunnerOutput,
    report: TierReport | ShapeReport | None,
    seconds: float,
    former: Set[str],
) -> TierOutcome:
    """What a step says of decoding: of its requests that emitted tokens, prompts left out.

    Requests in `former` have begun another turn since, whose parameters may differ.
    """
    drafts = scheduled.scheduled_spec_decode_tokens
    requests, places, rows, emitted = [], [], 0, []
    for request, tokens in scheduled.num_scheduled_tokens.items():
        place = output.req_id_to_index[request]
        num_drafts = len(drafts.get(request, ()))
        num_emitted = len(output.sampled_token_ids[place]) if output.sampled_token_ids else 0
        if tokens != 1 + num_drafts or num_drafts != plan.size or not num_emitted:
            continue
        if request in former:
            continue
        requests.append(request)
        places.append(place)
        rows += tokens
        emitted.append(num_emitted)
    is_alone = len(requests) == len(scheduled.num_scheduled_tokens)
    return TierOutcome(
        plan,
        requests,
        rows,
        np.array(emitted),
        report.expected[places] if isinstance(report, TierReport) else None,
        seconds if is_alone and seconds > 0 else None,
        report.drafts.of(places) if isinstance(report, ShapeReport) else None,
    )
