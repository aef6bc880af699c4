"""The RSD drafter (arXiv 2402.14160, section 3): draws a tree from a draft model without
replacement, and says how to verify it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from tree_kernels.rejection import reject_step

from drafttree.drafter import DraftForward, DraftTree
from rsd_plugin.config import RsdOptions
from rsd_plugin.noise import StepNoise
from rsd_plugin.sampling import Level, beam, branch


class RecursiveRejection:
    """Chooses the tokens along one step's trees, level by level (algorithm 3).

    Args:
        trees: as drawn, or cut by a breadth-first prefix.
        probs: float32 `[B, I, V]`, what the children of node i < I were drawn from; zeros in rows
            whose children were chosen as the most likely, which a sure target must verify.
        coins: float32 `[B, D + 1, K + 1]`, uniform, K being the most children of a node.
    """

    def __init__(self, trees: DraftTree, probs: Tensor, coins: Tensor) -> None:
        self._trees = trees
        self._probs = probs
        self._coins = coins
        self._rows = torch.arange(len(coins), device=coins.device)
        self._level = 0

    def __call__(self, target: Tensor, nodes: Tensor) -> Tensor:
        """The token after each of `nodes`, `int32 [B]`, which are of the next level.

        Args:
            target: float32 `[B, V]`, the target's distributions after them.
        """
        inner = self._probs.shape[1]
        rows = (self._rows * inner + nodes).masked_fill(nodes >= inner, -1)
        _, tokens = reject_step(
            target,
            self._probs.flatten(0, 1),
            self._rows,
            rows,
            self._children(nodes),
            self._coins[:, self._level],
        )
        self._level += 1
        return tokens

    def _children(self, nodes: Tensor) -> Tensor:
        """The tokens of the nodes' children in the order of drawing, `int32 [B, K]`, -1 padded."""
        most = self._coins.shape[2] - 1
        tokens = self._trees.tokens
        children = (self._trees.parents == nodes[:, None]) & (tokens >= 0)
        places = torch.where(children, children.cumsum(1) - 1, most)
        found = tokens.new_full((len(tokens), most + 1), -1)
        return found.scatter(1, places, torch.where(children, tokens, -1))[:, :most]


@dataclass(frozen=True)
class Drawn:
    """How one step's trees were drawn.

    Attributes:
        probs: float32 `[B, I, V]`, what the children of each inner node were drawn from; zeros
            where nothing was drawn.
        noise: the step's.
    """

    probs: Tensor
    noise: StepNoise


class RsdDrafter:
    """Draws trees of one shape.

    Args:
        vocab_size: the draft model's and the target's.
        seed: of the numbers that requests without a seed share.
    """

    def __init__(
        self, options: RsdOptions, vocab_size: int, device: torch.device, seed: int = 0
    ) -> None:
        self._shape = options.shape
        self._vocab_size = vocab_size
        self._shared = torch.Generator(device).manual_seed(seed)
        self.max_depth = len(self._shape.widths)
        widths = (1, *self._shape.widths)
        starts = [sum(widths[:level]) for level in range(len(widths))]
        self.columns = (
            -1,
            *(starts[level] for level, width in enumerate(widths[1:]) for _ in range(width)),
        )
        self._most_children = max(self._shape.factors or self._shape.widths)

    def draw(
        self,
        roots: Tensor,
        seeds: Sequence[int | None],
        lengths: Sequence[int],
        sampled: Tensor,
        forward: DraftForward,
    ) -> tuple[DraftTree, Drawn]:
        """Draw one tree under each of `roots`; where filters leave a node too few tokens, a level
        ends in columns without a node."""
        levels = self.levels(roots, seeds, lengths, sampled)
        wanted = next(levels)
        while True:
            try:
                wanted = levels.send(forward(*wanted))
            except StopIteration as done:
                return cast("tuple[DraftTree, Drawn]", done.value)

    def levels(
        self,
        roots: Tensor,
        seeds: Sequence[int | None],
        lengths: Sequence[int],
        sampled: Tensor,
    ) -> Generator[tuple[DraftTree, int], Tensor, tuple[DraftTree, Drawn]]:
        """Draw as `draw` does: yields what it wants of each forward, and is sent its result."""
        noise = StepNoise(self._shared, seeds, lengths)
        level, first = Level.root(roots), 0
        trees = DraftTree.of_roots(roots)
        every: list[Tensor] = []
        draws = sampled[:, None, None]
        for depth, width in enumerate(self._shape.widths):
            probs = yield trees, first
            every.append(torch.where(draws, probs, 0.0))
            log_p = probs.log()
            drawn = torch.where(draws, noise.gumbel(*log_p.shape[1:]), 0.0)
            if self._shape.factors is None:
                level = beam(level, log_p, drawn, width, sampled)
            else:
                level = branch(level, log_p, drawn, self._shape.factors[depth])
            parents = (first + level.parents).int().masked_fill(level.tokens < 0, -1)
            first = trees.tokens.shape[1]
            trees = _grown(trees, level.tokens, parents)
        # The leaves' KV: they may be accepted.
        yield trees, first
        return trees, Drawn(torch.cat(every, 1), noise)

    def verify_with(self, trees: DraftTree, drawn: Drawn) -> RecursiveRejection:
        """Recursive rejection sampling along trees that were drawn so, and perhaps cut since."""
        return RecursiveRejection(trees, drawn.probs, self._coins(drawn.noise))

    def verify_undrafted(
        self, roots: Tensor, seeds: Sequence[int | None], lengths: Sequence[int]
    ) -> RecursiveRejection:
        """Plain sampling, with the request's own numbers."""
        trees = DraftTree.of_roots(roots)
        probs = torch.zeros(len(roots), 0, self._vocab_size, device=roots.device)
        coins = self._coins(StepNoise(self._shared, seeds, lengths))
        return RecursiveRejection(trees, probs, coins)

    def _coins(self, noise: StepNoise) -> Tensor:
        # As many whether or not there is a draft: a seed then gives the same either way.
        return noise.uniform(self.max_depth + 1, self._most_children + 1)


def _grown(trees: DraftTree, tokens: Tensor, parents: Tensor) -> DraftTree:
    """The trees with one more level."""
    together = torch.cat([trees.tokens, tokens], 1)
    width = torch.full_like(together[:, 0], together.shape[1])
    return DraftTree(together, torch.cat([trees.parents, parents], 1), width)
