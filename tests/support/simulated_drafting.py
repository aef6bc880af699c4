"""Decoding with a model that drafts, on a simulated machine.

A run has a clock of its own, random numbers from a seed, and no engine. Acceptance is by level and
rank, and each level costs a forward of the draft model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from drafttree.budget.calibration import VerifiedDrafts
from drafttree.budget.level_acceptance import NO_DRAFTS
from drafttree.budget.planner_state import ShapePlan
from drafttree.budget.shape_planner import ShapePlanner
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape
from rsd_plugin import RsdOptions

MEASURED_ROWS = (1, 2, 4, 8, 12, 16)
BEAMS = RsdOptions(model="any", tree="auto").shapes
"""The shapes that beam trees of up to 3 x 5 are chosen from."""


@dataclass(frozen=True)
class Scenario:
    """A machine, its models and its texts.

    Attributes:
        fixed: Seconds of a forward of the target, of no rows.
        by_row: Seconds of each row.
        draft_fixed: Seconds of a forward of the draft model, of no rows.
        draft_by_row: Seconds of each row.
        first: Probability that a child of rank 0 is accepted after its parent, at a step.
        further: The same for each further rank, as a share of what is left.
        noise: Standard deviation of the logarithm of a step's time.
        stalls: Probability of a stall of a step, of 5 plain steps.
        slow: Factor on the draft model's times, at a step.
        answer: Tokens of an answer.
        prompt: Tokens of its prompt, as a multiple of its own.
        batch: Number of requests.
        undrafted: How many of them, the first ones, are served without drafts.
        pads: Whether these have as many rows in a step as the others.
        reads: Whether the draft model has to read what it missed while nothing was drafted.
        warm_up: Further seconds of the first drafts with a number of levels.
    """

    fixed: float = 0.03
    by_row: float = 0.0006
    draft_fixed: float = 0.003
    draft_by_row: float = 0.0001
    first: Callable[[int], float] = lambda step: 0.7
    further: float = 0.25
    noise: float = 0.05
    stalls: float = 0.0
    slow: Callable[[int], float] = lambda step: 1.0
    answer: int = 128
    prompt: float = 1.0
    batch: int = 1
    undrafted: int = 0
    pads: bool = False
    reads: bool = True
    warm_up: float = 0.0

    def forwards(self) -> dict[int, float]:
        """Seconds of the forwards that are timed at the start, by token count."""
        return {rows: self.fixed + self.by_row * rows for rows in MEASURED_ROWS}


class Policy(Protocol):
    """Chooses the shape of each step and learns the outcomes."""

    def choose(self, batch_size: int, catch_up_seconds: float) -> TreeShape:
        """Choose the shape of the next step."""

    def learn(self, shape: TreeShape, step: Step) -> None:
        """Learn from a step that was run."""


@dataclass(frozen=True)
class Step:
    """A step as it was measured: its shape, times, tokens, trees and accepted paths."""

    shape: TreeShape
    rows: int
    seconds: float
    draft_seconds: float
    catch_up_seconds: float
    emitted: int
    trees: DraftTree
    paths: NDArray[np.int32]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each request, were it not to end, `[B]`."""
        return (self.paths >= 0).sum(1)

    @property
    def verified(self) -> VerifiedDrafts:
        """The drafts of each request."""
        return VerifiedDrafts(self.trees.tree_size.numpy() - 1, self.tokens - 1)


@dataclass
class Run:
    """All steps of a run."""

    steps: list[Step] = field(default_factory=list)

    def speed(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per second from step `first` to step `last`, catching up included."""
        steps = self.steps[first:last]
        seconds = sum(step.seconds + step.catch_up_seconds for step in steps)
        return sum(step.emitted for step in steps) / seconds

    def harmonic_speed(self, first: int = 0) -> float:
        """The harmonic mean of the requests' tokens per second from step `first` on."""
        steps = self.steps[first:]
        seconds = sum(step.seconds + step.catch_up_seconds for step in steps)
        tokens = sum(step.tokens for step in steps)
        return float(1 / (seconds / tokens).mean())

    def drafted(self, first: int = 0, last: int | None = None) -> float:
        """Share of steps with drafts."""
        steps = self.steps[first:last]
        return sum(step.shape.depth > 0 for step in steps) / len(steps)

    def shapes(self, first: int = 0, last: int | None = None) -> set[TreeShape]:
        """The shapes that were used."""
        return {step.shape for step in self.steps[first:last]}


@dataclass
class Fixed:
    """Decodes with the same shape in all steps."""

    shape: TreeShape = NO_DRAFTS

    def choose(self, batch_size: int, catch_up_seconds: float) -> TreeShape:
        return self.shape

    def learn(self, shape: TreeShape, step: Step) -> None:
        pass


class Planned:
    """Decodes as the planner chooses."""

    def __init__(self, scenario: Scenario) -> None:
        self.planner = ShapePlanner(BEAMS, scenario.forwards(), pads_trees=scenario.pads)
        self._batch = scenario.batch
        self._drafted = scenario.batch - scenario.undrafted
        self._plan: ShapePlan | None = None

    def choose(self, batch_size: int, catch_up_seconds: float) -> TreeShape:
        self._plan = self.planner.choose(
            batch_size, lambda: catch_up_seconds, drafted=self._drafted
        )
        return self._plan.shape

    def learn(self, shape: TreeShape, step: Step) -> None:
        if shape.depth:
            verified = Verified(torch.from_numpy(step.paths), torch.empty(0), torch.empty(0))
            self.planner.acceptance.add(shape, step.trees, verified)
        assert self._plan is not None
        self.planner.record_step(
            self._plan,
            self._batch,
            step.rows,
            step.seconds,
            step.draft_seconds,
            step.emitted,
            step.verified,
            step.trees.tree_size.numpy() > 1,
            step.catch_up_seconds,
        )


def run(scenario: Scenario, policy: Policy, steps: int, seed: int = 0) -> Run:
    """Run steps; each answer that ends is followed by another."""
    rng = np.random.default_rng(seed)
    answers = np.random.default_rng(seed + 1000)
    # All policies meet the same stalls.
    stalls = np.random.default_rng(seed + 2000)
    batch, result = scenario.batch, Run()
    warm = {0}
    left = answers.integers(1, 2 * scenario.answer, batch)
    prompt = scenario.prompt if scenario.reads else 0.0
    unread = prompt * left
    for step in range(steps):
        slow = scenario.slow(step)
        by_row = scenario.draft_by_row * slow
        shape = policy.choose(batch, float(unread.sum()) * by_row)
        catch_up = 0.0
        if shape.depth and unread.any():
            catch_up, unread[:] = float(unread.sum()) * by_row, 0
        accepted = _accepted(scenario, shape, step, batch, rng)
        accepted[: scenario.undrafted, 1:] = -1
        emitted = np.minimum((accepted >= 0).sum(1), left)
        with_rows = batch if scenario.pads else batch - scenario.undrafted
        rows = batch + with_rows * shape.nodes
        drafting = 0.0
        if shape.depth:
            levels = (shape.depth + 1) * scenario.draft_fixed
            drafting = slow * levels + by_row * batch * (1 + shape.nodes)
            drafting *= float(np.exp(scenario.noise * rng.standard_normal()))
            drafting += scenario.warm_up * (shape.depth not in warm)
            warm.add(shape.depth)
        elif scenario.reads:
            unread += emitted
        seconds = scenario.fixed + scenario.by_row * rows
        seconds *= float(np.exp(scenario.noise * rng.standard_normal()))
        seconds += 5 * scenario.fixed * (stalls.random() < scenario.stalls)
        result.steps.append(
            Step(
                shape,
                rows,
                seconds + drafting,
                drafting,
                catch_up,
                int(emitted.sum()),
                beams(shape, batch, scenario.undrafted),
                accepted,
            )
        )
        policy.learn(shape, result.steps[-1])
        left -= emitted
        for row in np.flatnonzero(left <= 0):
            left[row] = answers.integers(1, 2 * scenario.answer)
            unread[row] = prompt * left[row]
    return result


def best_fixed(scenario: Scenario, steps: int, seed: int = 0) -> float:
    """Tokens per second with the best fixed shape, plain decoding included."""
    return max(run(scenario, Fixed(shape), steps, seed).speed() for shape in (NO_DRAFTS, *BEAMS))


def beams(shape: TreeShape, batch: int, undrafted: int = 0) -> DraftTree:
    """The model's nodes, whose levels are the children of the first node of the level above; none
    for the first `undrafted` requests."""
    parents = [-1]
    for level in range(shape.depth):
        parents += [max(1 + (level - 1) * shape.width, 0)] * shape.width
    tensor = torch.tensor(parents, dtype=torch.int32).repeat(batch, 1)
    tensor[:undrafted] = -1
    sizes = torch.full((batch,), len(parents), dtype=torch.int32)
    sizes[:undrafted] = 1
    return DraftTree(torch.zeros_like(tensor), tensor, sizes)


def alike(batch: int, nodes: int, emitted: float) -> tuple[VerifiedDrafts, NDArray[np.bool_]]:
    """Whole trees of all requests, which emitted the same number of tokens each."""
    drafts = VerifiedDrafts(np.full(batch, nodes), np.full(batch, emitted / batch - 1))
    return drafts, np.full(batch, nodes > 0)


def _accepted(
    scenario: Scenario, shape: TreeShape, step: int, batch: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """The paths of the accepted nodes, `int [B, D + 1]`, as if any node could have children."""
    first = scenario.first(step)
    ranks = np.array([(1 - first) * scenario.further * 0.5**rank for rank in range(1, 4)])
    bounds = np.cumsum([first, *ranks])
    path = np.full((batch, shape.depth + 1), -1, np.int32)
    path[:, 0] = 0
    going = np.ones(batch, bool)
    for level, draws in enumerate(rng.random((8, batch))[: shape.depth]):
        rank = np.searchsorted(bounds, draws)
        going &= rank < shape.width
        path[going, level + 1] = 1 + level * shape.width + rank[going]
    return path
