"""How many nodes each step drafts: times the steps, and asks the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from drafttree.drafter import DraftTree
from drafttree.verify import Verified
from recycle_plugin.costs import Costs
from recycle_plugin.planner import Planner

LADDER = (0, 3, 7, 11, 15, 23, 31, 47, 63, 80, 127, 191, 255)
"""With the root, most of them fill whole tiles of the matrix units."""

_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81, 128, 256)
_FORWARDS = 3
_SECONDS = 10.0
"""No larger forward is timed once all took so long together."""


def ladder_to(nodes: int) -> tuple[int, ...]:
    """The node counts to choose from, up to `nodes`."""
    return (*(rung for rung in LADDER if rung < nodes), nodes)


def measured_costs(forward: Callable[[int], float], most: int) -> Costs:
    """The costs of steps as far as forwards tell them.

    Args:
        forward: runs one of so many tokens; its seconds.
        most: the tokens of the largest.
    """
    started = perf_counter()
    seconds: dict[int, float] = {}
    for tokens in (*(each for each in _TOKENS if each < most), most):
        forward(tokens)  # the first of a size may compile
        seconds[tokens] = median(forward(tokens) for _ in range(_FORWARDS))
        if perf_counter() - started > _SECONDS:
            break
    return Costs.of_forwards(seconds)


@dataclass
class _Step:
    """A step on its way.

    Attributes:
        slots: of its requests.
        nodes: that were chosen for each.
        rows: nodes that it is to verify, roots included.
        began: when it was proposed.
        emitted: tokens, once it is verified.
    """

    slots: torch.Tensor
    nodes: int
    rows: int
    began: float
    emitted: int = 0


class Pace:
    """Chooses the nodes of a step, and books the time from when one was proposed to the next."""

    def __init__(self, planner: Planner, clock: Callable[[], float] = perf_counter) -> None:
        self.planner = planner
        self._clock = clock
        self._step: _Step | None = None

    def rests(self, slots: torch.Tensor) -> bool:
        """Whether the next step of these requests is plain, and no drafts are to be looked for."""
        self._book(slots)
        rests = self.planner.rests(len(slots))
        if rests:
            self._step = _Step(slots, 0, len(slots), self._began)
        return rests

    def choose(self, slots: torch.Tensor, scores: torch.Tensor, running: int) -> int:
        """The nodes of the next step, by what the best are worth.

        Args:
            scores: `float32 [B, F]`, of a tree's nodes, the root's first.
            running: the requests among them that have a root.
        """
        worth = scores[:, 1:].sort(1, descending=True).values.sum(0).cumsum(0)
        gains = [1.0] * len(self.planner.ladder)
        for place, rung in enumerate(self.planner.ladder[1:], 1):
            gains[place] += float(worth[min(rung, len(worth)) - 1]) / max(running, 1)
        nodes = self.planner.choose(len(slots), gains)
        self._step = _Step(slots, nodes, 0, self._began)
        return nodes

    def proposed(self, trees: DraftTree) -> None:
        """What was chosen came to these trees."""
        if self._step is not None:
            self._step.rows = int(trees.num_nodes.sum())

    def verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """The step has come to its end, or to another than was proposed."""
        step = self._step
        if step is None:
            return
        emitted = (verified.emitted >= 0).sum(1)
        whole = int((trees.tokens >= 0).sum()) == step.rows
        same = torch.equal(slots, step.slots)
        if step.emitted or not same or not whole or not bool((emitted > 0).all()):
            self._step = None
            return
        step.emitted = int(emitted.sum())

    def interrupted(self) -> None:
        """A prompt is read, say: the time until the next step is not this one's."""
        self._step = None

    def _book(self, slots: torch.Tensor) -> None:
        step, self._began = self._step, self._clock()
        self._step = None
        if step is not None and step.emitted and torch.equal(slots, step.slots):
            self.planner.finished(len(slots), step.nodes, self._began - step.began, step.emitted)
