"""Decoding on a simulated machine whose steps take longer now and then.

A run has a clock of its own, random numbers from a seed, and no engine. The scenarios of
`budget_scenarios` describe the machine, its other work and the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

FloatArray = np.ndarray[Any, Any]

MAX_NODES = 80
MEASURED_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81, 128, 256, 512, 1024, 2560)
"""Token counts of the forwards that are timed before the first step."""


@dataclass(frozen=True)
class Choice:
    """The trees of a step: `nodes` of each request, and up to `spine` more above `min_score`."""

    nodes: int
    spine: int = 0
    min_score: float = 0.0
    looked_up: bool = True


class Policy(Protocol):
    """Chooses the trees of each step and learns the outcomes."""

    def choose(self, scores: FloatArray) -> Choice:
        """Choose for scores `[B, MAX_NODES]`, the best first."""

    def learn(self, step: Step) -> None:
        """Learn from a step that was run."""


@dataclass(frozen=True)
class Step:
    """A step as it was measured.

    Attributes:
        choice: What was chosen.
        batch_size: Number of requests.
        rows: Tokens that were verified.
        seconds: Duration.
        draft_seconds: Part of it that was spent looking up drafts.
        emitted: Tokens of the whole batch.
        emitted_by_request: `[B]`, tokens of each request.
        truncated: Whether trees were cut, as a request was nearly finished.
    """

    choice: Choice
    batch_size: int
    rows: int
    seconds: float
    draft_seconds: float
    emitted: int
    emitted_by_request: FloatArray = field(compare=False)
    truncated: bool


@dataclass(frozen=True)
class Scenario:
    """A machine and its requests.

    Attributes:
        fixed: Seconds of a step of no rows.
        by_row: Seconds of each row.
        by_context: Further seconds of each row for 1,000 tokens of its request.
        lookup: Seconds of looking up drafts.
        noise: Standard deviation of the logarithm of a step's time.
        slow: Factor on steps at a time: `(time, whether the step verifies drafts)`.
        stalls: Probability of a stall in a step; it is scaled by `stalls_of_drafts` in steps that
            verify drafts.
        stall_seconds: Least duration of a stall. Durations have a Pareto tail of index 1.5, up to
            100 times the least.
        start_slow: Factor on the forwards that are timed at the start, by token count.
        quality: Scale of the probabilities of acceptance, at a step.
        optimism: Ratio of scores to probabilities.
        copies: Share of the answers that copy a text all through.
        answer: Tokens of an answer.
        batch: Number of requests at a step.
    """

    fixed: float = 0.03
    by_row: float = 0.0006
    by_context: float = 0.0
    lookup: float = 0.0005
    noise: float = 0.05
    slow: Callable[[float, bool], float] = lambda time, drafted: 1.0
    stalls: float = 0.0
    stalls_of_drafts: float = 1.0
    stall_seconds: float = 0.1
    start_slow: Callable[[int], float] = lambda rows: 1.0
    quality: Callable[[int], float] = lambda step: 1.0
    optimism: float = 1.0
    copies: float = 0.0
    answer: int = 128
    batch: Callable[[int], int] = lambda step: 1

    def forwards(self) -> dict[int, float]:
        """Seconds of the forwards that are timed at the start, by token count."""
        return {
            rows: (self.fixed + self.by_row * rows) * self.start_slow(rows)
            for rows in MEASURED_ROWS
        }


@dataclass
class _Request:
    number: int
    left: int
    length: int
    copies: bool


@dataclass
class Run:
    """The outcome of a run.

    Attributes:
        steps: All steps.
    """

    steps: list[Step] = field(default_factory=list)

    def tokens_per_second(self, first: int = 0, last: int | None = None) -> float:
        """Throughput from step `first` to step `last`."""
        steps = self.steps[first:last]
        return sum(step.emitted for step in steps) / sum(step.seconds for step in steps)

    def rest(self, first: int = 0, last: int | None = None) -> float:
        """Share of plain steps."""
        steps = self.steps[first:last]
        return sum(step.rows == step.batch_size for step in steps) / len(steps)

    @property
    def longest_rest(self) -> int:
        """Length of the longest sequence of steps without drafts."""
        longest = current = 0
        for step in self.steps:
            current = current + 1 if step.choice.nodes + step.choice.spine == 0 else 0
            longest = max(longest, current)
        return longest


class Decoder:
    """Runs the steps of a scenario."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(seed)
        # Answers are the same whatever the policy.
        self._answers = np.random.default_rng(seed + 1000)
        self._requests: list[_Request] = []
        self._started = 0
        self.time = 0.0

    @property
    def requests(self) -> list[int]:
        """Numbers of the requests in the batch; each request has its own."""
        return [request.number for request in self._requests]

    def run(self, policy: Policy, steps: int) -> Run:
        """Run steps; each answer that ends is followed by another."""
        run = Run()
        for step in range(steps):
            wanted = self._scenario.batch(step)
            del self._requests[wanted:]
            while len(self._requests) < wanted:
                self._requests.append(self._new())
            run.steps.append(self._step(policy, step))
            policy.learn(run.steps[-1])
            self._requests = [each if each.left > 0 else self._new() for each in self._requests]
        return run

    def _new(self) -> _Request:
        # Answers end at different times.
        answer = int(self._answers.integers(1, 2 * self._scenario.answer))
        self._started += 1
        return _Request(
            self._started, answer, 0, bool(self._answers.random() < self._scenario.copies)
        )

    def _step(self, policy: Policy, step: int) -> Step:
        scenario = self._scenario
        quality = scenario.quality(step)
        pace = quality * np.exp(0.3 * self._rng.standard_normal(len(self._requests)))
        chances = np.stack(
            [
                _chances(float(each), request.copies)
                for each, request in zip(pace, self._requests, strict=True)
            ]
        )
        scores = np.minimum(1.0, chances * scenario.optimism).astype(np.float32)
        choice = policy.choose(scores)
        rows, emitted = 0, []
        truncated = False
        for request, chance, score in zip(self._requests, chances, scores, strict=True):
            nodes = _num_nodes(choice, score)
            # A tree is cut so that it cannot end after the answer.
            verified = min(nodes, request.left - 1)
            truncated |= verified < nodes
            accepted = _accepted(chance[:verified], request.copies, self._rng)
            tokens = min(request.left, 1 + accepted)
            request.left -= tokens
            request.length += tokens
            rows += 1 + verified
            emitted.append(tokens)
        lookup = scenario.lookup * len(self._requests) * bool(choice.looked_up)
        drafted = rows > len(self._requests)
        seconds = self._seconds(rows, drafted) + lookup
        self.time += seconds
        return Step(
            choice,
            len(self._requests),
            rows,
            seconds,
            lookup,
            sum(emitted),
            np.array(emitted),
            truncated,
        )

    def _seconds(self, rows: int, drafted: bool) -> float:
        scenario, rng = self._scenario, self._rng
        context = sum(request.length for request in self._requests) / len(self._requests)
        by_row = scenario.by_row + scenario.by_context * context / 1000
        seconds = (scenario.fixed + by_row * rows) * scenario.slow(self.time, drafted)
        seconds *= float(np.exp(scenario.noise * rng.standard_normal()))
        # The same numbers are drawn whatever happens, so that runs of two policies are alike.
        stalled, tail = rng.random(), (1 - rng.random()) ** (-1 / 1.5)
        if stalled < scenario.stalls * (scenario.stalls_of_drafts if drafted else 1.0):
            seconds += scenario.stall_seconds * min(100.0, tail)
        return seconds


def _chances(quality: float, copies: bool) -> FloatArray:
    """The probability that each node is accepted, the best first, `[MAX_NODES]`."""
    index = np.arange(MAX_NODES)
    if copies:
        chances: FloatArray = 0.985 ** (index + 1.0)
        return chances
    return np.minimum(0.9, quality * 0.32 * 0.8**index + 0.1 * quality / (index + 2.0))


def _num_nodes(choice: Choice, scores: FloatArray) -> int:
    further = scores[choice.nodes : choice.nodes + choice.spine]
    return choice.nodes + int((further >= choice.min_score).sum())


def _accepted(chances: FloatArray, copies: bool, rng: np.random.Generator) -> int:
    if copies:  # a path
        return int((chances > rng.random()).sum())
    # A draw for each node, whatever is verified, so that runs of two policies are alike.
    return int((rng.random(MAX_NODES)[: len(chances)] < chances).sum())


@dataclass(frozen=True)
class Fixed:
    """Decodes with the same trees in all steps."""

    nodes: int

    def choose(self, scores: FloatArray) -> Choice:
        return Choice(self.nodes, looked_up=self.nodes > 0)

    def learn(self, step: Step) -> None:
        pass
