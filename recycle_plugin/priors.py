"""What candidates of each origin are thought to be worth before any was verified."""

from __future__ import annotations

import torch
from tree_kernels.context import LONGEST
from tree_kernels.offers import ORIGINS, PAIR_STATES, ROW_STATES, TOP

DEPTH = 8
"""Of grown trees."""

# How often candidates were the target's next token, measured on Spec-Bench prompts: those of a
# token's row and of a pair's, by rank, and the copy after a suffix, by its length.
ROW_PRIORS = (0.30, 0.083, 0.055, 0.037, 0.025, 0.02, 0.012, 0.009)
PAIR_PRIORS = (0.487, 0.098, 0.045, 0.04, 0.023, 0.017, 0.011, 0.010)
COPY_PRIORS = (0.15, 0.4, 0.6, 0.7, 0.75, 0.85)
PAIR_WEIGHT = 0.85


def expected_priors() -> torch.Tensor:
    """What candidates are worth before any was verified, `float32 [ORIGINS]`."""
    row = torch.tensor((0.0, *ROW_PRIORS))
    pair = torch.tensor((0.0, *PAIR_PRIORS))[:, None]
    both = torch.cat((PAIR_WEIGHT * pair + (1 - PAIR_WEIGHT) * row, row[None]))
    copy = torch.tensor((0.0, *COPY_PRIORS))[:, None, None]
    # Others share what the copy leaves, and the copy may be one of theirs.
    left = (1 - copy) * both
    return torch.cat((copy + left, left[1:])).reshape(ORIGINS)


assert (2 * LONGEST + 1, PAIR_STATES, ROW_STATES) == (13, TOP + 2, TOP + 1)
