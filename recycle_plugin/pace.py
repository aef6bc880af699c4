"""How many nodes each step drafts: times the steps, and asks the planner.

Nothing here waits for a device: what it made of a step is looked at when the next one is proposed,
and by then the host has waited for the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from drafttree.drafter import DraftTree
from drafttree.transfer import Coming
from drafttree.verify import Verified
from recycle_plugin.costs import Costs
from recycle_plugin.planner import Planner

LADDER = (0, 3, 7, 11, 15, 23, 31, 47, 63, 80, 127, 191, 255)
LADDER_ON_DEVICE = (0, 7, 15, 31, 80)
"""With the root, most of them fill whole tiles of the matrix units."""

_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81, 128, 256, 512, 1024, 2048, 4096, 8192)
_FORWARDS = 3
_SECONDS = 10.0
"""No larger forward is timed once all took so long together."""


def ladder_to(nodes: int, device: torch.device) -> tuple[int, ...]:
    """The node counts to choose from, up to `nodes`; few where each has to be captured."""
    ladder = LADDER if device.type == "cpu" else LADDER_ON_DEVICE
    return (*(rung for rung in ladder if rung < nodes), nodes)


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
        began: when it was proposed.
        look: the seconds in which drafts were looked for.
        rows: `int32 [B]`, nodes that it is to verify, roots included; None for the roots alone.
        tokens: `int32 [B, N]`, the trees that were verified; -1 for no node.
        emitted: `int32 [B, D]`; -1 for no token. None while it is not verified.
    """

    slots: torch.Tensor
    nodes: int
    began: float
    look: float = 0.0
    rows: Coming | None = None
    tokens: Coming | None = None
    emitted: Coming | None = None


def _same(slots: torch.Tensor, others: torch.Tensor) -> bool:
    return slots is others or (slots.device.type == "cpu" and torch.equal(slots, others))


def _there(tokens: Coming) -> np.ndarray[Any, np.dtype[np.bool_]]:
    there: np.ndarray[Any, np.dtype[np.bool_]] = tokens.wait().numpy() >= 0
    return there


class Pace:
    """Chooses the nodes of a step, and books the time from when one was proposed to the next.

    NumPy does little things in a fraction of the time that PyTorch takes.
    """

    def __init__(self, planner: Planner, clock: Callable[[], float] = perf_counter) -> None:
        self.planner = planner
        self._clock = clock
        self._step: _Step | None = None
        self._scores: Coming | None = None

    def rests(self, slots: torch.Tensor) -> bool:
        """Whether the next step of these requests is plain, and no drafts are to be looked for."""
        self._book(slots)
        rests = self.planner.rests(len(slots))
        if rests:
            self._step = _Step(slots, 0, self._began)
        return rests

    def choose(self, slots: torch.Tensor, scores: torch.Tensor) -> int:
        """The nodes of the next step, by what the best are worth.

        Args:
            scores: `float32 [B, F]`, of a tree's nodes, the root's first. While a device is still
                at them, those of the last look stand in for them.
        """
        coming = Coming.of(scores)
        known = coming if coming.arrived is None or self._scores is None else self._scores
        self._scores = coming
        best_first = -np.sort(-known.wait()[:, 1:].numpy(), 1)
        worth = np.pad(best_first.cumsum(1), ((0, 0), (1, 0)))
        rungs = np.minimum(self.planner.ladder, best_first.shape[1])
        nodes = self.planner.choose(len(slots), 1 + worth[:, rungs])
        self._step = _Step(slots, nodes, self._began, self._clock() - self._began)
        return nodes

    def proposed(self, trees: DraftTree) -> None:
        """What was chosen came to these trees."""
        if self._step is not None:
            self._step.rows = Coming.of(trees.num_nodes)

    def verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """The step has come to its end, or to another than was proposed."""
        step = self._step
        if step is None:
            return
        if step.emitted is not None or not _same(slots, step.slots):
            self._step = None
            return
        step.tokens, step.emitted = Coming.of(trees.tokens), Coming.of(verified.emitted)

    def interrupted(self) -> None:
        """A prompt is read, say: the time until the next step is not this one's."""
        self._step = None

    def _book(self, slots: torch.Tensor) -> None:
        step, self._began = self._step, self._clock()
        self._step = None
        if step is None or not _same(slots, step.slots):
            return
        if step.tokens is None or step.emitted is None:
            return
        emitted = _there(step.emitted).sum(1)
        if not (emitted > 0).all():
            return
        batch, seconds = len(slots), self._began - step.began
        rows = batch if step.rows is None else step.rows.wait().numpy().sum()
        # The host cuts trees near a request's end, say.
        if _there(step.tokens).sum() == rows:
            self.planner.finished(batch, step.nodes, seconds, step.look, int(emitted.sum()))
        else:
            self.planner.cut(batch, seconds, int(emitted.sum()))
