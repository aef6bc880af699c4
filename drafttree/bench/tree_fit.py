"""Acceptance of each node of a static tree, and the tree that would have been best."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from drafttree.tree import MAX_DEPTH, MAX_DRAFT_TOKENS, RankPath, StaticTree

Shares = Mapping[RankPath, float]
"""Share of decode steps in which a node is accepted, by rank path; 1 for the root, `()`."""


def tokens_per_step(tree: StaticTree, shares: Shares) -> float:
    """Expected tokens per decode step: the accepted draft tokens and the bonus token."""
    return 1 + sum(shares[path] for path in tree.paths)


@dataclass(frozen=True)
class MeasuredTree:
    """A static tree and the acceptance of its nodes in a run.

    Attributes:
        tree: The topology.
        steps: Decode steps of the run, summed over requests.
        tried: How often a node was drafted under an accepted parent, by rank path.
        hit: How often a node was accepted, by rank path; the root counts in every step.
    """

    tree: StaticTree
    steps: int
    tried: Mapping[RankPath, int]
    hit: Mapping[RankPath, int]

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any], steps: int) -> MeasuredTree:
        """Read the counts that `Drafter.acceptance` returns for a static tree.

        Raises:
            ValueError: The counts are incomplete or contradict each other.
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
        """Share of the steps in which each node was accepted."""
        return {path: hit / self.steps for path, hit in self.hit.items()}

    def undrafted(self, path: RankPath) -> int:
        """How often a node was not drafted although its parent was accepted."""
        return self.hit[path[:-1]] - self.tried[path]

    def rank_shares(self) -> dict[int, float]:
        """Conditional acceptance by rank: of nodes whose parent was accepted, how many were too.

        Counts nodes at depth 2 and more, or the root's children if the tree has no deeper nodes.
        """
        inner = [path for path in self.tree.paths if len(path) > 1] or self.tree.paths
        hits: Counter[int] = Counter()
        parents: Counter[int] = Counter()
        for path in inner:
            hits[path[-1]] += self.hit[path]
            parents[path[-1]] += self.hit[path[:-1]]
        return {rank: hits[rank] / max(parents[rank], 1) for rank in parents}


def fit(measured: MeasuredTree, num_draft_tokens: int) -> tuple[StaticTree, Shares]:
    """The static tree with the most expected accepted tokens, and the expected shares of its nodes.

    The expected share of a node is the measured one if it was in the tree, and otherwise its
    parent's share times the conditional acceptance of its rank. No child has a larger share than
    its parent, so the nodes with the largest shares form a tree; of equal ones the shallower wins.

    Args:
        measured: Acceptance in a run.
        num_draft_tokens: Size of the tree, the root not counted.

    Raises:
        ValueError: The size is out of range, or the run measured too few ranks for it.
    """
    if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"a tree of {num_draft_tokens} draft tokens is out of range: "
            f"use 1 to {MAX_DRAFT_TOKENS}"
        )
    ranks = measured.rank_shares()
    shares: dict[RankPath, float] = {(): 1.0}
    frontier: list[tuple[float, int, RankPath]] = [
        (-measured.shares[path], 1, path) for path in measured.tree.paths if len(path) == 1
    ]
    heapq.heapify(frontier)
    while frontier and len(shares) <= num_draft_tokens:
        negative_share, depth, path = heapq.heappop(frontier)
        shares[path] = -negative_share
        if depth < MAX_DEPTH:
            for rank in ranks:
                child = (*path, rank)
                value = measured.shares.get(child, -negative_share * ranks[rank])
                heapq.heappush(frontier, (-value, depth + 1, child))
    if len(shares) <= num_draft_tokens:
        raise ValueError(
            f"a tree of {num_draft_tokens} draft tokens is out of range: the ranks that the run "
            f"measured allow {len(shares) - 1}"
        )
    return StaticTree.from_paths(path for path in shares if path), shares


def read_run(file: Path) -> dict[str, Any]:
    """Read a bench report that has acceptance statistics.

    Raises:
        ValueError: The file cannot be read, is not the report of one run, or has no statistics.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the run {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a bench report: it is not JSON") from error
    if isinstance(report, dict) and isinstance(runs := report.get("runs"), list):
        if len(runs) != 1:
            raise ValueError(f"{file} contains {len(runs)} runs: give the report of one")
        report = runs[0]
    needed = ("engine", "method", "counters")
    if not isinstance(report, dict) or not all(key in report for key in needed):
        raise ValueError(f"{file} is not a bench report: write one with drafttree bench --output")
    if not report.get("acceptance"):
        raise ValueError(
            f"{file} has no acceptance statistics: its method, {report['method']}, does not count "
            "them, or it was written by an older version: run drafttree bench again"
        )
    return report
