"""The random numbers of one step, separate for each request.

They follow from a request's seed and its length, and do not depend on the other requests of the
batch. Drafting and verification draw from streams of their own.
"""

from __future__ import annotations

from math import prod

from torch import Tensor
from tree_kernels.gumbel_top import Perturbed, gumbel_top
from tree_kernels.noise import uniform_numbers

_VERIFICATION = 0


class StepNoise:
    """The random numbers of one step for a batch of B requests.

    Args:
        seeds: `int64 [B]`, the seed of each request.
        lengths: Integers `[B]`, length of each request in tokens, which changes with every step.
    """

    def __init__(self, seeds: Tensor, lengths: Tensor) -> None:
        self._seeds = seeds
        self._lengths = lengths
        self._drafted = _VERIFICATION

    def children(self, probs: Tensor, sampled: Tensor, count: int) -> Perturbed:
        """Draw tokens after the nodes of a level with new noise.

        Args:
            probs: `float32 [B, W, V]`, the draft model's distributions after the nodes.
            sampled: `bool [B]`; where it is false the most likely tokens are taken.
            count: Most tokens after each node.
        """
        self._drafted += 1
        count = min(count, probs.shape[2])
        return gumbel_top(probs, self._seeds, self._lengths, sampled, self._drafted, count)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in (0, 1) for verification, `float32 [B, *shape]`; the same each time."""
        drawn = uniform_numbers(self._seeds, self._lengths, _VERIFICATION, prod(shape))
        return drawn.view(len(drawn), *shape)
