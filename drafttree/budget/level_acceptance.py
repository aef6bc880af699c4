"""How often the children of accepted nodes are accepted, by level and by rank.

A drafter that asks a model for its drafts pays for them before it knows what they are worth. So a
tree's worth is predicted from what was accepted lately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tree_kernels.mask import depths

from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape

_MEMORY = 96.0
"""Recorded steps after which an outcome has 1/e of its weight."""
_AGE_MEMORY = 256.0
"""Elapsed steps after which an outcome has 1/e of its weight: texts change while nothing is
drafted."""
_PRIOR_WEIGHT = 1.5
"""Weight of the level above, or of the prior, in outcomes of one request."""
_PRIOR = (0.55, 0.12, 0.06, 0.04)
"""Probabilities of acceptance by rank before anything is known; further ranks have the last."""
_MOST = 0.98


NO_DRAFTS = TreeShape(0, 0, 0)


def are_whole(shape: TreeShape, trees: DraftTree) -> NDArray[np.bool_]:
    """Whether each request's tree is as it was drafted, `[B]`; one without drafts is not.

    A tree that the host cut lacks its last nodes. Nodes are also missing where fewer tokens can be
    sampled than a node has children, but then the last level has some.

    Args:
        shape: The shape that was asked for.
        trees: The trees as verified, on the host.
    """
    levels = depths(trees.parents, trees.tree_size).numpy()
    whole: NDArray[np.bool_] = (levels >= shape.depth).any(1) | (
        trees.tree_size.numpy() > shape.nodes
    )
    return whole


class LevelAcceptance:
    """Decaying counts of accepted nodes, for trees of up to D levels and K children of a node.

    The rank of a node is its place among its siblings, from 0. The probability that the accepted
    path goes on at a level with children of ranks below k is the sum of those of the ranks. What
    was never seen is taken from the level above, which a chain may know when a tree is considered.

    Args:
        depth: D.
        width: K.
    """

    def __init__(self, depth: int, width: int) -> None:
        self._hits = np.zeros((depth, width))
        self._tried = np.zeros((depth, width))
        self._clock = 0
        self._updated_at = 0

    def pass_step(self) -> None:
        """Let a step pass, whatever it was."""
        self._clock += 1

    def add(self, shape: TreeShape, trees: DraftTree, verified: Verified) -> None:
        """Add the outcome of a step; the tensors are on the host.

        Args:
            shape: The shape that was asked for. A node without a child of some rank counts as one
                whose child of that rank was rejected, as the shape has room for it.
            trees: The trees as verified.
            verified: The outcome.
        """
        weight = math.exp(-1 / _MEMORY) * self._kept()
        self._hits *= weight
        self._tried *= weight
        self._updated_at = self._clock
        parents, path = trees.parents.numpy(), verified.path.numpy()
        levels = min(shape.depth, path.shape[1] - 1)
        width = min(shape.width, self._hits.shape[1])
        # A tree that the host cut above a level tells nothing of it.
        level = depths(trees.parents, trees.tree_size).numpy()
        has_level = (level[:, :, None] == np.arange(1, levels + 1)).any(1)
        reached = (path[:, :levels] >= 0) & has_level
        self._tried[:levels, :width] += reached.sum(0)[:, None]
        requests, hit = (reached & (path[:, 1 : levels + 1] > 0)).nonzero()
        columns, siblings = path[requests, hit + 1], parents[requests]
        above = siblings[np.arange(len(requests)), columns]
        earlier = np.arange(parents.shape[1]) < columns[:, None]
        ranks = ((siblings == above[:, None]) & earlier).sum(1)
        np.add.at(self._hits, (hit, np.minimum(ranks, width - 1)), 1.0)

    @property
    def evidence(self) -> float:
        """How many outcomes of one request in one step are remembered, by their weights."""
        return float(self._kept() * self._tried[0, 0])

    def chances(self) -> NDArray[np.float64]:
        """The probability that the child of each rank is accepted after its parent, `[D, K]`."""
        kept = self._kept()
        depth, width = self._hits.shape
        chances = np.empty((depth, width))
        above = np.array([_PRIOR[min(rank, len(_PRIOR) - 1)] for rank in range(width)])
        for level in range(depth):
            above = (_PRIOR_WEIGHT * above + kept * self._hits[level]) / (
                _PRIOR_WEIGHT + kept * self._tried[level]
            )
            chances[level] = above
        return chances

    def expected_tokens(
        self, shapes: Sequence[TreeShape], optimism: float = 0.0
    ) -> NDArray[np.float32]:
        """Tokens that a request is expected to emit with each shape, bonus included, `[S]`.

        Args:
            shapes: The shapes.
            optimism: By how many standard deviations of their estimates the probabilities that a
                path goes on may be higher.
        """
        sums = np.minimum(self.chances().cumsum(1), _MOST)
        if optimism:
            known = self._kept() * self._tried + _PRIOR_WEIGHT
            sums = np.minimum(sums + optimism * np.sqrt(sums * (1 - sums) / known), _MOST)
        # Column 0 and row 0 are those of the shape without drafts.
        expected = np.zeros((1 + sums.shape[0], 1 + sums.shape[1]))
        expected[1:, 1:] = sums.cumprod(0).cumsum(0)
        depths, widths = np.array([(shape.depth, shape.width) for shape in shapes]).T
        tokens: NDArray[np.float32] = (1 + expected[depths, widths]).astype(np.float32)
        return tokens

    def reset(self) -> None:
        """Forget all outcomes."""
        self._hits[:] = 0
        self._tried[:] = 0

    def _kept(self) -> float:
        return math.exp((self._updated_at - self._clock) / _AGE_MEMORY)
