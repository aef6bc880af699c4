"""Prior acceptance rates of candidates by source, used until enough of them were verified."""

from __future__ import annotations

import torch
from tree_kernels.candidates import BIGRAM_STATES, NUM_SOURCES, ROW_STATES, TOP
from tree_kernels.ngrams import LONGEST

DEPTH = 8
"""Maximum depth of dynamic trees."""

# Measured acceptance rates on Spec-Bench prompts: candidates of the adjacency matrix and of the
# bigram table by rank, and n-gram matches by the length of the matched suffix.
ROW_PRIORS = (0.30, 0.083, 0.055, 0.037, 0.025, 0.02, 0.012, 0.009)
BIGRAM_PRIORS = (0.487, 0.098, 0.045, 0.04, 0.023, 0.017, 0.011, 0.010)
MATCH_PRIORS = (0.15, 0.4, 0.6, 0.7, 0.75, 0.85)
BIGRAM_WEIGHT = 0.85


def expected_priors() -> torch.Tensor:
    """Prior acceptance rate of each candidate source, `float32 [NUM_SOURCES]`."""
    row = torch.tensor((0.0, *ROW_PRIORS))
    bigram = torch.tensor((0.0, *BIGRAM_PRIORS))[:, None]
    both = torch.cat((BIGRAM_WEIGHT * bigram + (1 - BIGRAM_WEIGHT) * row, row[None]))
    match = torch.tensor((0.0, *MATCH_PRIORS))[:, None, None]
    # The other candidates share the probability that the match leaves; the match itself may also be
    # one of the tables' candidates, in which case it gets both.
    left = (1 - match) * both
    return torch.cat((match + left, left[1:])).reshape(NUM_SOURCES)


assert (2 * LONGEST + 1, BIGRAM_STATES, ROW_STATES) == (13, TOP + 2, TOP + 1)
