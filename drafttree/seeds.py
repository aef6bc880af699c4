"""Seeds of requests, as draft-model drafters take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drafttree.transfer import on_device


class Seeds:
    """Gives requests without a seed of their own a random one in each step.

    Args:
        device: Where the seeds are needed.
        seed: What the random ones follow from.
        replica: Index of the engine among those that share the seed, and must not draw alike.
    """

    def __init__(self, device: torch.device, seed: int = 0, replica: int = 0) -> None:
        self._device = device
        if replica:
            mixed = np.random.SeedSequence((seed % (1 << 64), replica))
            seed = int(mixed.generate_state(1, np.uint64)[0])
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, given: Sequence[int | None]) -> torch.Tensor:
        """The seeds of a batch, `int64 [B]`; `given` are those that users gave, or None."""
        random = torch.randint(1 << 62, (len(given),), generator=self._generator).tolist()
        # A seed may have any number of bits.
        seeds = [
            drawn if seed is None else (seed + (1 << 63)) % (1 << 64) - (1 << 63)
            for seed, drawn in zip(given, random, strict=True)
        ]
        return on_device(np.array(seeds, np.int64), self._device)
