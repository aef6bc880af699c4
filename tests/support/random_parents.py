"""Parents of random trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def random_trees(seed: int, widths: Sequence[int], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Trees of different sizes, parents before children, padded with -1.

    `kind` is chain, star or any. Returns the parents, int32 `[B, N]`, and the sizes, int32 `[B]`.
    """
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((len(widths), max(widths)), -1, dtype=torch.int32)
    for request, count in enumerate(widths):
        for node in range(1, count):
            chosen = int(torch.randint(0, node, (1,), generator=generator))
            parents[request, node] = {"chain": node - 1, "star": 0, "any": chosen}[kind]
    return parents, torch.tensor(widths, dtype=torch.int32)
