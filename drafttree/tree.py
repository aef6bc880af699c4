"""Static draft trees: topologies that are fixed before the first token is drafted.

Nodes stand in breadth-first order with the root (the last accepted token) at 0, so that any
prefix of the nodes is a valid tree: engines truncate drafts without asking.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

MAX_NODES = 255
MAX_DEPTH = 32

RankPath = tuple[int, ...]

BRANCHING = "branch:"
"""How trees that are given by their branching factors are written: `branch:4-2-1`."""


@dataclass(frozen=True)
class StaticTree:
    """A draft tree whose nodes are named by rank paths.

    `paths[i]` lists the candidate rank taken at every level from the root to node `i + 1`; the
    root's empty path is not listed. Build one with the class methods, which validate and sort.
    """

    paths: tuple[RankPath, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """Sort rank paths breadth-first and check them.

        Raises:
            ValueError: a path is empty, repeated, negative, too deep, without its parent, or
                there are no or too many paths.
        """
        listed = [tuple(path) for path in paths]
        known = set(listed)
        if not listed:
            raise ValueError("the tree has no nodes: list at least one rank path")
        if len(listed) > MAX_NODES:
            raise ValueError(f"the tree has {len(listed)} nodes: at most {MAX_NODES} are allowed")
        if len(known) != len(listed):
            twice = next(path for path in listed if listed.count(path) > 1)
            raise ValueError(f"path {list(twice)} is listed twice: list every node once")
        for path in listed:
            if not path or any(type(rank) is not int or rank < 0 for rank in path):
                raise ValueError(f"path {list(path)} is not a list of ranks of 0 or more")
            if len(path) > MAX_DEPTH:
                raise ValueError(f"path {list(path)} is deeper than {MAX_DEPTH} levels")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(
                    f"the tree is not prefix-closed: path {list(path)} is listed without its "
                    f"parent {list(path[:-1])}"
                )
        return cls(tuple(sorted(listed, key=lambda path: (len(path), path))))

    @classmethod
    def from_file(cls, file: Path) -> StaticTree:
        """Read a tree from JSON: `{"paths": [[0], [1], [0, 0], ...]}`.

        Raises:
            ValueError: the file cannot be read, is no such JSON, or its tree is not valid.
        """
        try:
            content = json.loads(file.read_text())
            paths = content["paths"]
            if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
                raise TypeError
        except OSError as error:
            raise ValueError(f"cannot read the tree file {file}: {error.strerror}") from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'the tree file {file} must hold {{"paths": [[0], [0, 0], ...]}}'
            ) from error
        try:
            return cls.from_paths(paths)
        except ValueError as error:
            raise ValueError(f"the tree file {file}: {error}") from error

    @classmethod
    def from_budget(cls, nodes: int, rank_priors: Sequence[float]) -> StaticTree:
        """The `nodes` nodes of highest path probability.

        A path's probability is the product of its ranks' priors. A child never scores above its
        parent, so taking the best first leaves the tree prefix-closed.
        """
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes={nodes} is out of range: use 1 to {MAX_NODES}")
        if not rank_priors or not all(0 < prior <= 1 for prior in rank_priors):
            raise ValueError("rank priors must be probabilities above 0")
        frontier: list[tuple[float, int, RankPath]] = [
            (-prior, 1, (rank,)) for rank, prior in enumerate(rank_priors)
        ]
        heapq.heapify(frontier)
        chosen: list[RankPath] = []
        while frontier and len(chosen) < nodes:
            score, depth, path = heapq.heappop(frontier)
            chosen.append(path)
            if depth < MAX_DEPTH:
                for rank, prior in enumerate(rank_priors):
                    heapq.heappush(frontier, (score * prior, depth + 1, (*path, rank)))
        return cls.from_paths(chosen)

    @classmethod
    def from_branching(cls, factors: Sequence[int]) -> StaticTree:
        """The full tree with `factors[d]` children under every node of depth d."""
        if not factors or any(factor < 1 for factor in factors):
            raise ValueError(f"branching factors {list(factors)} must be 1 or more")
        nodes = 0
        width = 1
        for factor in factors:
            width *= factor
            nodes += width
            if nodes > MAX_NODES:
                raise ValueError(
                    f"branching factors {list(factors)} make more than {MAX_NODES} nodes"
                )
        return cls.from_paths(
            path
            for depth in range(1, len(factors) + 1)
            for path in product(*(range(factor) for factor in factors[:depth]))
        )

    @classmethod
    def from_notation(cls, notation: str) -> StaticTree:
        """The tree of branching factors as in `branch:4-2-1`.

        Raises:
            ValueError: it is not written so, or makes no tree.
        """
        try:
            factors = [int(factor) for factor in notation.removeprefix(BRANCHING).split("-")]
        except ValueError as error:
            raise ValueError(
                f"tree={notation!r} is no list of branching factors: write {BRANCHING}4-2-1"
            ) from error
        return cls.from_branching(factors)

    @property
    def nodes(self) -> int:
        """The number of draft nodes, the root not counted."""
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of every node; -1 for the root at 0."""
        index: dict[RankPath, int] = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        return (-1, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The candidate rank of every node under its parent; 0 for the root."""
        return (0, *(path[-1] for path in self.paths))

    @cached_property
    def level_ends(self) -> tuple[int, ...]:
        """`level_ends[d]` is the number of nodes of depth d or less, the root included."""
        return tuple(
            1 + sum(len(path) <= depth for path in self.paths) for depth in range(self.depth + 1)
        )

    @property
    def depth(self) -> int:
        """The depth of the deepest node; the root's is 0."""
        return len(self.paths[-1])

    @property
    def width(self) -> int:
        """The number of candidates a token must have: one more than the highest rank."""
        return 1 + max(self.ranks)
