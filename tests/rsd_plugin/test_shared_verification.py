"""Sampled trees with nodes of tables, proved lossless by enumeration, and planted faults.

The sampled children of a node are tried by recursive rejection. If all are rejected, the next token
is drawn from what is left of the target, and it is accepted if it is the token of a table's node.
Which nodes the tables propose may depend on everything that was drawn for the tree.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
from enumerated_steps import CASES, Law, error, every_beam, every_branching

from scripts.experiments.rsd.acceptance import recursive_rejection
from scripts.experiments.rsd.positions import Rule, walked
from scripts.experiments.rsd.rsd_expectation import Children, Distributions, NodePath, Stop

VOCAB = 3
DEPTH = 3
"""Depth of the tables' nodes."""

Drawn = Callable[[Distributions], Law]
Tables = Callable[[Children], dict[NodePath, list[int]]]
"""The children that tables propose below each node of a tree, given what was drawn for it."""


class Shared(dict[NodePath, list[int]]):
    """A tree, with the children that were sampled before those of the tables.

    Attributes:
        sampled: The tree as it was sampled.
        of_tables: The children that were not sampled.
    """

    def __init__(self, sampled: Children, proposed: Children) -> None:
        self.sampled = sampled
        self.of_tables = {
            path: [token for token in tokens if token not in sampled.get(path, ())]
            for path, tokens in proposed.items()
        }
        super().__init__({path: [*tokens] for path, tokens in sampled.items()})
        for path, tokens in self.of_tables.items():
            if tokens:
                self[path] = [*self.get(path, ()), *tokens]


def copies(sampled: Children) -> dict[NodePath, list[int]]:
    """The same nodes, whatever was drawn."""
    return {(): [0], (0,): [1, 0], (0, 1): [2], (2,): [2]}


def after_drawn(sampled: Children) -> dict[NodePath, list[int]]:
    """Nodes below all nodes, which follow from everything that was drawn."""
    number = zlib.crc32(repr(sorted(sampled.items())).encode())
    found: dict[NodePath, list[int]] = {}
    paths: list[NodePath] = [()]
    for path in paths:  # grows meanwhile
        tokens = [(number >> sum(path) + len(path)) % VOCAB]
        found[path] = tokens
        for token in {*tokens, *sampled.get(path, ())}:
            if len(path) + 1 < DEPTH:
                paths.append((*path, token))
    return found


TABLES: dict[str, Tables] = {"copies": copies, "after what was drawn": after_drawn}


def branching(draft: Distributions) -> Law:
    return every_branching(draft, (2, 2))


def beam(draft: Distributions) -> Law:
    return every_beam(draft, VOCAB, (2, 2))


def chain(draft: Distributions) -> Law:
    return every_branching(draft, (1, 1))


DRAWN: dict[str, Drawn] = {"chain": chain, "branching": branching, "beam": beam}


def with_tables(drawn: Drawn, tables: Tables) -> Drawn:
    def of(draft: Distributions) -> Law:
        for probability, sampled in drawn(draft):
            yield probability, Shared(sampled, tables(sampled))

    return of


def shared(children: Children, target: Distributions, draft: Distributions) -> list[Stop]:
    """The rule."""
    return _shared(children, target, draft)


def from_the_target(children: Children, target: Distributions, draft: Distributions) -> list[Stop]:
    """A fault: the tables' nodes are looked up in the target's own distribution."""
    return _shared(children, target, draft, loses_residual=True)


def _shared(
    children: Children,
    target: Distributions,
    draft: Distributions,
    *,
    loses_residual: bool = False,
) -> list[Stop]:
    assert isinstance(children, Shared)
    stops: list[Stop] = []

    def below(path: NodePath, reached: float) -> None:
        sampled, others = children.sampled.get(path, ()), children.of_tables.get(path, [])
        left = target(path)
        if sampled:
            accepted, left = recursive_rejection(left, draft(path), sampled)
            for token, probability in zip(sampled, accepted, strict=True):
                if probability > 0:
                    below((*path, token), reached * probability)
            reached *= 1 - sum(accepted)
            left = target(path) if loses_residual else left
        mass = float(left.sum())
        if mass <= 0:
            assert reached < 1e-12
            return
        left = left / mass
        for token in others:
            if float(left[token]) > 0:
                below((*path, token), reached * float(left[token]))
        remaining = left.clone()
        remaining[others] = 0.0
        stops.append(Stop(path, reached * float(remaining.sum()), remaining))

    below((), 1.0)
    return stops


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("drawn", DRAWN)
def test_a_step_emits_the_target(drawn: str, tables: str, case: str) -> None:
    assert error(case, with_tables(DRAWN[drawn], TABLES[tables]), shared, VOCAB) < 1e-12


def ranked(draft: Distributions) -> Law:
    """A fault: the second child is dropped if its token is less likely than the tables' node."""
    for probability, sampled in every_branching(draft, (2,)):
        first, second = sampled[()]
        kept = [first, second] if float(draft(())[second]) > 0.2 else [first]
        yield probability, Shared({(): kept}, {(): [0]})


def cut(size: int, *, by_depth: bool) -> Drawn:
    """Trees with a table's node below the root if token 0 was drawn last, cut to `size` nodes.

    As a fault it stands before the nodes of the second level, so that it takes the place of that
    token.
    """

    def of(draft: Distributions) -> Law:
        for probability, sampled in branching(draft):
            first, second = sampled[()]
            last = sampled[(second,)][-1]
            levels = [[((), first), ((), second)], [((), 3 - first - second)]]
            levels.append([((top,), token) for top in (first, second) for token in sampled[(top,)]])
            if last != 0:
                levels[1] = []
            if not by_depth:
                levels[1], levels[2] = levels[2], levels[1]
            nodes = [node for level in levels for node in level][:size]
            kept: dict[NodePath, list[int]] = {}
            of_tables: dict[NodePath, list[int]] = {}
            for path, token in nodes:
                into = kept if token in sampled[path] else of_tables
                into.setdefault(path, []).append(token)
            yield probability, Shared(kept, of_tables)

    return of


FAULTS: dict[str, tuple[Drawn, Rule]] = {
    "the residual is lost": (with_tables(beam, copies), from_the_target),
    "tables' nodes tried as if they were sampled": (
        with_tables(branching, copies),
        walked(recursive_rejection),
    ),
    "sampled nodes ranked by their tokens": (ranked, shared),
    "trees cut by depth": (cut(6, by_depth=True), shared),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    assert error("random", *FAULTS[name], VOCAB) > 1e-3


@pytest.mark.parametrize("size", range(1, 8))
def test_trees_that_begin_with_the_sampled_nodes_may_be_cut(size: int) -> None:
    assert error("random", cut(size, by_depth=False), shared, VOCAB) < 1e-12
