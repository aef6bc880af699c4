"""The tier controller as a policy of `simulated_decoding`, with outcomes that arrive late."""

from __future__ import annotations

from collections import deque

import numpy as np
from simulated_decoding import Choice, Decoder, FloatArray, Run, Scenario, Step

from drafttree.budget.tier_controller import TierController, TierOutcome, TierPlan

TIERS = (0, 3, 7, 15, 31, 63)


class Tiered:
    """Decodes with the tiers that the controller chooses for the step after the current one.

    Args:
        scenario: The scenario, whose forwards are measured at the start.
        late: Steps from the last outcome that is known at a decision to the step that it is for.
        room: Most rows of a step.
    """

    def __init__(self, scenario: Scenario, *, late: int = 3, room: int = 8192) -> None:
        self.controller = TierController(TIERS, scenario.forwards())
        self.requests: list[int] = []
        self._late = late
        self._room = room
        self._next = self._plan = TierPlan(0)
        self._scores: FloatArray = np.empty((0, 0))
        self._decoded: list[int] = []
        self._in_flight: deque[TierOutcome] = deque()

    def choose(self, scores: FloatArray) -> Choice:
        """Take the trees that were chosen a step ago, cut to the room that there is."""
        self._scores, self._decoded = scores, list(self.requests)
        self._plan = self._next
        # The next step is sent to the device while this one and the one before are under way.
        while len(self._in_flight) > self._late - 2:
            self.controller.record(self._in_flight.popleft())
        most = self._room // len(scores) - 1
        self._next = self.controller.choose(self._decoded, most)
        return Choice(self._plan.size, looked_up=self._plan.looks_up)

    def learn(self, step: Step) -> None:
        """Let the outcome of a step wait until it arrives."""
        expected = None
        if self._plan.looks_up:
            sums = np.cumsum(self._scores, 1)
            expected = np.ones((len(sums), len(TIERS)))
            expected[:, 1:] += sums[:, [size - 1 for size in TIERS[1:]]]
        self._in_flight.append(
            TierOutcome(
                self._plan,
                self._decoded,
                step.rows,
                step.emitted_by_request,
                expected,
                step.seconds,
            )
        )


def run_tiers(
    scenario: Scenario, steps: int, *, seed: int = 0, late: int = 3, room: int = 8192
) -> tuple[Run, Tiered]:
    """Run the scenario with the controller."""
    policy = Tiered(scenario, late=late, room=room)

    class Numbered(Decoder):
        def _step(self, _: object, step: int) -> Step:
            policy.requests = self.requests
            return super()._step(policy, step)

    return Numbered(scenario, seed).run(policy, steps), policy
