"""How many nodes each step drafts: times the steps, and asks the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
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
        whole: whether all of it was verified; the host cuts trees near a request's end, say.
    """

    slots: torch.Tensor
    nodes: int
    rows: int
    began: float
    emitted: int = 0
    whole: bool = True


def _same(slots: torch.Tensor, others: torch.Tensor) -> bool:
    return slots is others or torch.equal(slots, others)


class Pace:
    """Chooses the nodes of a step, and books the time from when one was proposed to the next.

    For a CPU, where a step without drafts is soon done: NumPy does little things in a fraction of
    the time that PyTorch takes.
    """

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

    def choose(self, slots: torch.Tensor, scores: torch.Tensor) -> int:
        """The nodes of the next step, by what the best are worth.

        Args:
            scores: `float32 [B, F]`, of a tree's nodes, the root's first.
        """
        best_first = -np.sort(-scores[:, 1:].numpy(), 1)
        worth = best_first.sum(0).cumsum() / len(slots)
        rungs = np.array(self.planner.ladder[1:])
        gains = 1 + worth[np.minimum(rungs, len(worth)) - 1]
        nodes = self.planner.choose(len(slots), [1.0, *gains.tolist()])
        self._step = _Step(slots, nodes, 0 if nodes else len(slots), self._began)
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
        emitted = (verified.emitted.numpy() >= 0).sum(1)
        if step.emitted or not _same(slots, step.slots) or not (emitted > 0).all():
            self._step = None
            return
        step.emitted = int(emitted.sum())
        step.whole = int((trees.tokens.numpy() >= 0).sum()) == step.rows

    def interrupted(self) -> None:
        """A prompt is read, say: the time until the next step is not this one's."""
        self._step = None

    def _book(self, slots: torch.Tensor) -> None:
        step, self._began = self._step, self._clock()
        self._step = None
        if step is None or not step.emitted or not _same(slots, step.slots):
            return
        seconds = self._began - step.began
        if step.whole:
            self.planner.finished(len(slots), step.nodes, seconds, step.emitted)
        else:
            self.planner.cut(len(slots), seconds, step.emitted)
