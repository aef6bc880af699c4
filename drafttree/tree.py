"""Draft trees: static topologies, the trees of a batch, and the outcome of their verification.

Nodes are in breadth-first order with the root (the last accepted token) at 0, so that any prefix of
the nodes is a valid tree and engines may truncate drafts.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path

import torch

MAX_DRAFT_TOKENS = 255
MAX_DEPTH = 64

NO_TOKEN = -1
"""In place of a token, or of the column of a parent, where there is none."""

RankPath = tuple[int, ...]

BRANCHING = "branch:"
"""Prefix of a tree that is given by its branching factors, as in `branch:4-2-1`."""


@dataclass(frozen=True)
class StaticTree:
    """A draft tree of fixed shape, whose nodes are identified by rank paths.

    `paths[i]` lists the candidate rank taken at every level from the root to node `i + 1`; the
    root's empty path is not listed. Build one with the class methods, which validate and sort.
    """

    paths: tuple[RankPath, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """Sort rank paths breadth-first and check them.

        Raises:
            ValueError: A path is empty, repeated, negative, too deep or without its parent, or
                there are no or too many paths.
        """
        listed = [tuple(path) for path in paths]
        known = set(listed)
        if not listed:
            raise ValueError("the tree has no nodes: list at least one rank path")
        if len(listed) > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"the tree has {len(listed)} nodes: at most {MAX_DRAFT_TOKENS} are allowed"
            )
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
            ValueError: The file cannot be read, is not such JSON, or its tree is not valid.
        """
        try:
            content = json.loads(file.read_text())
            paths = content["paths"]
            if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
                raise TypeError
            if any(isinstance(rank, list | dict) for path in paths for rank in path):
                raise TypeError
        except OSError as error:
            raise ValueError(f"cannot read the tree file {file}: {error.strerror}") from error
        # Not only JSONDecodeError: text that is no UTF-8, numbers that are too long, deep nesting.
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f'the tree file {file} must contain {{"paths": [[0], [0, 0], ...]}}'
            ) from error
        try:
            return cls.from_paths(paths)
        except ValueError as error:
            raise ValueError(f"the tree file {file}: {error}") from error

    @classmethod
    def from_budget(cls, num_draft_tokens: int, rank_priors: Sequence[float]) -> StaticTree:
        """The tree of the `num_draft_tokens` draft tokens with the highest path probabilities.

        A path's probability is the product of its ranks' priors. A child is never more probable
        than its parent, so taking nodes best first leaves the tree prefix-closed.
        """
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"nodes={num_draft_tokens} is out of range: use 1 to {MAX_DRAFT_TOKENS}"
            )
        if not rank_priors or not all(0 < prior <= 1 for prior in rank_priors):
            raise ValueError("rank priors must be probabilities above 0")
        frontier: list[tuple[float, int, RankPath]] = [
            (-prior, 1, (rank,)) for rank, prior in enumerate(rank_priors)
        ]
        heapq.heapify(frontier)
        chosen: list[RankPath] = []
        while frontier and len(chosen) < num_draft_tokens:
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
        num_draft_tokens = 0
        width = 1
        for factor in factors:
            width *= factor
            num_draft_tokens += width
            if num_draft_tokens > MAX_DRAFT_TOKENS:
                raise ValueError(
                    f"branching factors {list(factors)} make more than {MAX_DRAFT_TOKENS} nodes"
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
            ValueError: The notation is wrong, or its factors give no valid tree.
        """
        try:
            factors = [int(factor) for factor in notation.removeprefix(BRANCHING).split("-")]
        except ValueError as error:
            raise ValueError(
                f"tree={notation!r} is not a list of branching factors: write {BRANCHING}4-2-1"
            ) from error
        return cls.from_branching(factors)

    def first_path(self, longest: int) -> StaticTree:
        """The chain of first children, down to depth `longest` at most."""
        path: RankPath = ()
        chain: list[RankPath] = []
        for child in self.paths:
            # Siblings are sorted by rank, so the first one comes before the others.
            if len(chain) < longest and child[:-1] == path:
                path = child
                chain.append(child)
        return StaticTree(tuple(chain))

    @property
    def num_draft_tokens(self) -> int:
        """The number of draft tokens: all nodes but the root."""
        return len(self.paths)

    @property
    def tree_size(self) -> int:
        """The number of nodes, the root included."""
        return 1 + len(self.paths)

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
        """The number of candidates needed for each node: one more than the highest rank."""
        return 1 + max(self.ranks)


@dataclass(frozen=True)
class DraftTree:
    """The draft trees of a batch of B requests.

    Every parent comes before its children, so any prefix of the columns is a valid tree too. Nodes
    are in breadth-first order, or from the most to the least probable one if the host chooses the
    number of draft tokens (`Target.sizes_trees`), or if the drafter samples from a draft model and
    has tables. A column whose token is -1 contains no node; its parent is -1.

    Attributes:
        tokens: `int32 [B, N]`; column 0 is the root, the last accepted token, or -1 for a request
            that is not drafted for.
        parents: `int32 [B, N]`, the column of each node's parent; -1 for roots.
        tree_size: `int32 [B]`, number of leading columns that may contain nodes, the root included;
            there is no node after them. 0 for a request of which nothing is verified.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    tree_size: torch.Tensor

    @classmethod
    def of_roots(cls, roots: torch.Tensor) -> DraftTree:
        """Trees without drafts under `roots`, `int32 [B]`."""
        tokens = roots[:, None]
        return cls(tokens, torch.full_like(tokens, -1), torch.ones_like(roots))

    def rooted(self, roots: torch.Tensor) -> DraftTree:
        """The same under `roots`, `int32 [B]`, in tensors of its own."""
        tokens = torch.cat((roots[:, None], self.tokens[:, 1:]), 1)
        return DraftTree(tokens, self.parents, self.tree_size)

    @property
    def drafted(self) -> bool:
        """Whether there are columns for drafts."""
        return self.tokens.shape[1] > 1

    def check(self, num_draft_tokens: int | None = None, *, by_depth: bool = True) -> None:
        """Verify that the tensors are draft trees; reads them on the host.

        Args:
            num_draft_tokens: Greatest number of columns beside the root; None to leave that
                unchecked.
            by_depth: Whether nodes must be in breadth-first order.

        Raises:
            ValueError: The message names the request, the column and the rule that is broken.
        """
        batch, width = self.tokens.shape if self.tokens.dim() == 2 else (-1, 0)
        shapes = [tuple(each.shape) for each in (self.parents, self.tree_size)]
        if width < 1 or shapes != [(batch, width), (batch,)]:
            raise ValueError(
                f"tokens {[*self.tokens.shape]}, parents {[*self.parents.shape]} and tree_size "
                f"{[*self.tree_size.shape]} must be [B, N], [B, N] and [B], N at least 1"
            )
        if num_draft_tokens is not None and width > 1 + num_draft_tokens:
            raise ValueError(
                f"the trees have {width - 1} columns for drafts and at most {num_draft_tokens} are "
                "declared"
            )
        for tensor in (self.tokens, self.parents, self.tree_size):
            if tensor.dtype != torch.int32:
                raise ValueError(f"tokens, parents and tree_size must be int32, not {tensor.dtype}")
        rows = zip(
            self.tokens.tolist(), self.parents.tolist(), self.tree_size.tolist(), strict=True
        )
        for row, (tokens, parents, size) in enumerate(rows):
            _check_tree(f"request {row}", tokens, parents, size, by_depth=by_depth)

    def truncated(self, num_draft_tokens: int) -> DraftTree:
        """The trees without the columns beyond `num_draft_tokens` drafts; no copy is made."""
        width = 1 + num_draft_tokens
        if self.tokens.shape[1] <= width:
            return self
        return DraftTree(
            self.tokens[:, :width], self.parents[:, :width], self.tree_size.clamp(max=width)
        )

    def previous_tokens(self, of_roots: torch.Tensor) -> torch.Tensor:
        """The token before each node, `int32 [B, N]`; arbitrary where there is no node.

        Args:
            of_roots: `int32 [B]`, the tokens before the roots.
        """
        if not self.drafted:
            return of_roots[:, None]
        # The parent of roots, -1, is the first column.
        above = torch.cat((of_roots[:, None], self.tokens), 1)
        return above.gather(1, self.parents.long() + 1)

    def on_host(self) -> DraftTree:
        """The trees in the host's memory, for which the host waits."""
        return DraftTree(self.tokens.cpu(), self.parents.cpu(), self.tree_size.cpu())

    def path(self, row: int, column: int) -> list[int]:
        """The draft tokens on the path from the root to a node; empty where there is no node."""
        tokens: list[int] = []
        while column > 0:
            tokens.insert(0, int(self.tokens[row, column]))
            column = int(self.parents[row, column])
        return [token for token in tokens if token >= 0]


def _check_tree(
    name: str, tokens: list[int], parents: list[int], size: int, *, by_depth: bool
) -> None:
    """Check one request's tree; `name` begins the messages."""
    if parents[0] != -1:
        raise ValueError(f"{name}: the root's parent is {parents[0]} and must be -1")
    used = [column for column, token in enumerate(tokens) if token >= 0]
    if used and used[0] != 0:
        raise ValueError(f"{name}: column {used[0]} contains a node, but there is no root")
    last = used[-1] if used else -1
    if not last < size <= len(tokens):
        raise ValueError(
            f"{name}: tree_size is {size}, but the last node is in column {last} of {len(tokens)}"
        )
    depth = {0: 0}
    siblings: set[tuple[int, int]] = set()
    for before, column in pairwise(used):
        parent = parents[column]
        if parent not in depth:
            raise ValueError(
                f"{name}: the parent of column {column} is {parent}, which is not an earlier node"
            )
        depth[column] = depth[parent] + 1
        if by_depth and depth[column] < depth[before]:
            raise ValueError(
                f"{name}: column {column} is shallower than column {before}: nodes must be in "
                "breadth-first order"
            )
        if (parent, tokens[column]) in siblings:
            raise ValueError(
                f"{name}: token {tokens[column]} is drafted twice under column {parent}"
            )
        siblings.add((parent, tokens[column]))
    for column, token in enumerate(tokens):
        if column and token < 0 and parents[column] != -1:
            raise ValueError(f"{name}: column {column} contains no node, so its parent must be -1")


@dataclass(frozen=True)
class Verified:
    """The outcome of one verification; D is the greatest depth of a draft token.

    Attributes:
        path: `int32 [B, D + 1]`, the node after which each token was emitted; padded with -1.
        emitted: `int32 [B, D + 1]`, the accepted tokens, then the bonus token; padded with -1.
        num_emitted: `int32 [B]`; 0 for a request whose tree has no root.
        rows: Number of rows that were verified; None if they are those of the trees.
        bound: `int64 [B, 2]`, how many nodes of each tree were proposed, the root counted, and how
            many accepted tokens a grammar adds to it whatever is proposed; None if all trees are as
            they were proposed.
        reads_prompts: Whether the step has read a part of a prompt, or of a text again, so that its
            time says nothing of decoding. Where the host itself times steps, as vLLM's V2
            model runner does, it is not set.
    """

    path: torch.Tensor
    emitted: torch.Tensor
    num_emitted: torch.Tensor
    rows: int | None = None
    bound: torch.Tensor | None = None
    reads_prompts: bool = False
