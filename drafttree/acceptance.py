"""How often each node of a static tree was accepted, and the tree that would have been best."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from drafttree.tree import MAX_DEPTH, MAX_NODES, RankPath, StaticTree

Shares = Mapping[RankPath, float]
"""By rank path, in which part of all decode steps a node is accepted; the root, (), in all."""


def tokens_a_step(tree: StaticTree, shares: Shares) -> float:
    """The tokens that a decode step emits: one and the accepted nodes."""
    return 1 + sum(shares[path] for path in tree.paths)


@dataclass(frozen=True)
class MeasuredTree:
    """A static tree, and what became of its nodes in a run.

    Attributes:
        steps: the run's decode steps, one for each request in each.
        tried: by rank path, how often a node was drafted under an accepted parent.
        hit: how often it was accepted; the root in all steps.
    """

    tree: StaticTree
    steps: int
    tried: Mapping[RankPath, int]
    hit: Mapping[RankPath, int]

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any], steps: int) -> MeasuredTree:
        """From what `Drafter.acceptance` says of a static tree.

        Raises:
            ValueError: these are no such counts.
        """
        if steps < 1:
            raise ValueError("the run has no decode steps")
        try:
            tree = StaticTree.from_paths(counts["paths"])
            paths = [tuple(path) for path in counts["paths"]]
            tried = dict(zip(paths, map(int, counts["tried"]), strict=True))
            hit = {(): steps} | dict(zip(paths, map(int, counts["hit"]), strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its counts by node cannot be read: {error}") from error
        for path in paths:
            if not 0 <= hit[path] <= tried[path] <= hit[path[:-1]]:
                raise ValueError(
                    f"its counts contradict each other: node {list(path)} was accepted "
                    f"{hit[path]} times of {tried[path]}, its parent {hit[path[:-1]]} times"
                )
        return cls(tree, steps, tried, hit)

    @cached_property
    def shares(self) -> Shares:
        """In which part of the steps each node was accepted."""
        return {path: hit / self.steps for path, hit in self.hit.items()}

    def undrafted(self, path: RankPath) -> int:
        """How often a node was missing though its parent was accepted."""
        return self.hit[path[:-1]] - self.tried[path]

    def rank_shares(self) -> dict[int, float]:
        """By rank, how often nodes below the root's children were accepted of the times that their
        parents were; where there are none such, the root's children stand in."""
        inner = [path for path in self.tree.paths if len(path) > 1] or self.tree.paths
        hits: Counter[int] = Counter()
        parents: Counter[int] = Counter()
        for path in inner:
            hits[path[-1]] += self.hit[path]
            parents[path[-1]] += self.hit[path[:-1]]
        return {rank: hits[rank] / max(parents[rank], 1) for rank in parents}


def fit(measured: MeasuredTree, nodes: int) -> tuple[StaticTree, Shares]:
    """The static tree of `nodes` nodes that would have accepted most, and its expected shares.

    A node that was in the tree is worth what was measured of it, any other what its parent is
    worth times the share of its rank. No child is worth more than its parent, so the best of all
    are a tree; of equal ones the shallower stays.

    Raises:
        ValueError: `nodes` is out of range, or the run measured too few ranks for so many.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"a tree of {nodes} nodes is out of range: use 1 to {MAX_NODES}")
    ranks = measured.rank_shares()
    shares: dict[RankPath, float] = {(): 1.0}
    frontier: list[tuple[float, int, RankPath]] = [
        (-measured.shares[path], 1, path) for path in measured.tree.paths if len(path) == 1
    ]
    heapq.heapify(frontier)
    while frontier and len(shares) <= nodes:
        worth, depth, path = heapq.heappop(frontier)
        shares[path] = -worth
        if depth < MAX_DEPTH:
            for rank in ranks:
                child = (*path, rank)
                value = measured.shares.get(child, -worth * ranks[rank])
                heapq.heappush(frontier, (-value, depth + 1, child))
    if len(shares) <= nodes:
        raise ValueError(
            f"a tree of {nodes} nodes is out of range: with the ranks that the run measured there "
            f"are {len(shares) - 1}"
        )
    return StaticTree.from_paths(path for path in shares if path), shares


def read_run(file: Path) -> dict[str, Any]:
    """A bench run's report that says what was accepted.

    Raises:
        ValueError: there is no such file, it is no report of one run, or it does not say it.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the run {file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is no bench report: it is not JSON") from error
    if isinstance(report, dict) and isinstance(runs := report.get("runs"), list):
        if len(runs) != 1:
            raise ValueError(f"{file} holds {len(runs)} runs: give the report of one")
        report = runs[0]
    needed = ("engine", "method", "counters")
    if not isinstance(report, dict) or not all(key in report for key in needed):
        raise ValueError(f"{file} is no bench report: write one with drafttree bench --output")
    if not report.get("acceptance"):
        raise ValueError(
            f"{file} does not say which nodes were accepted: its method, {report['method']}, does "
            "not count them, or drafttree was older then"
        )
    return report
