"""The random numbers of one step, separate for each request.

They follow from a request's seed and its length, and do not depend on the other requests of the
batch. Drafting and verification draw from streams of their own.
"""

from __future__ import annotations

from math import prod

from torch import Tensor
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

    def gumbel(self, *shape: int) -> Tensor:
        """New standard Gumbel noise for drafting, `float32 [B, *shape]`."""
        self._drafted += 1
        # The largest noise comes from a number close to 0, where the logarithm is exact.
        return self._uniform(self._drafted, *shape).neg_().log1p_().neg_().log_().neg_()

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in (0, 1) for verification, `float32 [B, *shape]`; the same each time."""
        return self._uniform(_VERIFICATION, *shape)

    def _uniform(self, stream: int, *shape: int) -> Tensor:
        drawn = uniform_numbers(self._seeds, self._lengths, stream, prod(shape))
        return drawn.view(len(drawn), *shape)
