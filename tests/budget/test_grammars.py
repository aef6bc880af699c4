"""Tokens that grammars give in every step do not pass for drafts.

A simulated machine decodes requests some of which have a grammar. After each token that such a
request emits, the grammar makes one further token certain on average, whatever is drafted. The
score counts expected tokens and true times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from drafttree.budget.costs import CostModel
from drafttree.budget.planner import Planner
from drafttree.budget.tree_choice import TreeChoice

SIZES = (0, 3, 7, 15)
LOOKUP = 0.0005


@dataclass
class Machine:
    """A machine and its requests.

    Attributes:
        by_row: Seconds of each row, beside 0.05 of each step.
        requests: Number of requests.
        bound: How many of them have a grammar.
        quality: Draft tokens of a request that are accepted if there are any number of them.
        sizes: The draft tokens of each step so far.
    """

    by_row: float
    requests: int
    bound: int
    quality: float = 2.4
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(7)

    def planner(self) -> Planner:
        return Planner(SIZES, {rows: self.seconds(rows) for rows in (1, 4, 16, 64)})

    def seconds(self, rows: float) -> float:
        return 0.05 + self.by_row * rows

    def accepted(self, size: int) -> float:
        """Draft tokens of a request that are accepted on average."""
        return self.quality * (1 - math.exp(-size / 4))

    def outcome(self, size: int) -> tuple[float, float]:
        """Expected tokens and seconds of a step with `size` draft tokens, without the lookup."""
        own = 1 + self.accepted(size)
        rows = self.requests * (1 + size) + self.bound * own
        return (self.requests + self.bound) * own, self.seconds(rows)

    def rate(self, size: int) -> float:
        """Tokens per second with the same number of draft tokens in all steps."""
        tokens, seconds = self.outcome(size)
        return tokens / (seconds + LOOKUP * (size > 0))

    def run(self, planner: Planner, steps: int, *, tells: bool = True) -> float:
        """Tokens per second of steps that the planner chooses.

        Args:
            planner: The planner.
            steps: Number of steps.
            tells: Whether the planner is told what is due to grammars.
        """
        tokens = seconds = 0.0
        for _ in range(steps):
            size, lookup = 0, 0.0
            if not planner.should_skip_drafting(self.requests):
                expected = [1 + self.accepted(each) for each in SIZES]
                size = planner.choose(self.requests, np.array([expected] * self.requests))
                lookup = LOOKUP
            own = 1 + self._rng.binomial(size, self.accepted(size) / max(size, 1), self.requests)
            given = int(self._rng.negative_binomial(own[: self.bound], 0.5).sum())
            rows = self.requests * (1 + size) + given
            taken = self.seconds(rows) * math.exp(0.03 * self._rng.standard_normal()) + lookup
            step = self.requests, TreeChoice(size), rows, taken, lookup, int(own.sum()) + given
            planner.record_step(*step, *((given, given) if tells else (0, 0)))
            means = self.outcome(size)
            tokens, seconds = tokens + means[0], seconds + means[1] + lookup
            self.sizes.append(size)
        return tokens / seconds


@pytest.mark.parametrize(
    ("by_row", "requests", "bound"), [(0.01, 1, 1), (0.002, 4, 2), (0.002, 4, 4)]
)
def test_drafting_ends_where_only_grammars_give_tokens(
    by_row: float, requests: int, bound: int
) -> None:
    """Many drafts are accepted at first, and then so few that they cost more than they save."""
    reached = {}
    for tells in (True, False):
        machine = Machine(by_row, requests, bound)
        planner = machine.planner()
        machine.run(planner, 300, tells=tells)
        assert machine.sizes[100:].count(0) < 20
        machine.quality = 0.6
        machine.run(planner, 200, tells=tells)
        plain = machine.rate(0)
        assert all(machine.rate(size) < 0.95 * plain for size in SIZES[1:])
        reached[tells] = machine.run(planner, 1000, tells=tells) / plain
        if tells:
            assert machine.sizes[-1000:].count(0) > 900
    assert reached[True] > 0.98
    # A planner that takes all tokens for those of its drafts goes on.
    assert reached[False] < 0.95


@pytest.mark.parametrize("requests", [1, 4])
def test_drafts_that_pay_beside_grammars_are_drafted(requests: int) -> None:
    machine = Machine(0.01 / requests, requests, requests)
    best = max(map(machine.rate, SIZES))
    assert best > 1.3 * machine.rate(0)
    planner = machine.planner()
    machine.run(planner, 200)
    assert machine.run(planner, 1000) > 0.97 * best
    assert machine.sizes[-1000:].count(0) < 20


def test_a_report_of_plain_steps_has_all_of_their_tokens_and_rows() -> None:
    planner = Planner(SIZES, {1: 1.0, 4: 1.3})
    for _ in range(20):
        if not planner.should_skip_drafting(1):
            assert planner.choose(1, np.ones((1, len(SIZES)))) == 0
        planner.record_step(1, TreeChoice(0), 3, 1.2, 0.0, 2, 2, 1)
    (row,) = planner.explain()
    assert (row["rows"], row["expected_tokens"], row["realised_tokens"]) == (3, 2, 2)
    assert row["predicted_ms"] == pytest.approx(1200, rel=0.02)


def test_steps_with_rows_of_grammars_are_those_of_the_size_that_was_chosen() -> None:
    """All steps take twice as long as the curve says."""
    costs = CostModel((0, 3, 7), {1: 1.0, 8: 1.7})
    for step in range(400):
        added = step % 3
        costs.observe(1, 1, 2 * costs.curve.seconds(1 + added), added)
    assert costs.seconds(1, 1, 0) == pytest.approx(2.0, rel=0.02)
    # One row is added on average.
    assert costs.seconds(1, 1) == pytest.approx(2.2, rel=0.02)
    assert costs.of_sizes(1)[0] == pytest.approx(costs.seconds(1, 1))
    assert costs.of_sizes(1)[1] > 1.05 * costs.seconds(1, 4, 0)
    # No tree is larger than the largest ones.
    assert costs.of_sizes(1)[2] == pytest.approx(costs.seconds(1, 8, 0))
    assert not costs.knows_stalls_of_drafts
    assert costs.deviations(1, 0)[1] > 0.1
    for _ in range(600):
        costs.observe(1, 1, 2.0)
    assert costs.seconds(1, 1) == pytest.approx(2.0, rel=0.01)
