"""The random numbers of one step, separate for each seeded request.

A request with a seed has its own generators, which are seeded in each step from the request's seed
and its length. They do not depend on the other requests of the batch. All
requests without a seed share one generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1


class StepNoise:
    """The random numbers of one step for a batch of B requests.

    Args:
        shared: Generator of the requests without a seed.
        seeds: Seed of each request, or None.
        lengths: Length of each request in tokens, which changes with every step.
    """

    def __init__(
        self, shared: torch.Generator, seeds: Sequence[int | None], lengths: Sequence[int]
    ) -> None:
        self._shared = shared
        self._batch_size = len(seeds)
        self._any_unseeded = any(seed is None for seed in seeds)
        self._for_drafts, self._for_verification = (
            [
                (row, torch.Generator(shared.device).manual_seed(_mix(_mix(seed) ^ key)))
                for row, (seed, key) in enumerate(zip(seeds, keys, strict=True))
                if seed is not None
            ]
            for keys in ([2 * length for length in lengths], [2 * length + 1 for length in lengths])
        )

    def gumbel(self, *shape: int) -> Tensor:
        """Standard Gumbel noise for drafting, `float32 [B, *shape]`."""
        drawn = torch.empty(self._batch_size, *shape, device=self._shared.device)
        if self._any_unseeded:
            drawn.exponential_(generator=self._shared)
        for row, generator in self._for_drafts:
            drawn[row].exponential_(generator=generator)
        # An exact zero would give infinite noise.
        return drawn.clamp_(min=torch.finfo(drawn.dtype).tiny).log_().neg_()

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1) for verification, `float32 [B, *shape]`."""
        drawn = torch.empty(self._batch_size, *shape, device=self._shared.device)
        if self._any_unseeded:
            drawn.uniform_(generator=self._shared)
        for row, generator in self._for_verification:
            drawn[row].uniform_(generator=generator)
        return drawn


def _mix(value: int) -> int:
    """Spread neighbouring numbers over 64 bits (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
