"""Prior acceptance rates of candidates by source, used until enough of them were verified."""

from __future__ import annotations

import torch
from tree_kernels.candidates import BIGRAM_STATES, NUM_SOURCES, ROW_STATES, TOP
from tree_kernels.copies import BUCKETS, COPY_STATES

from drafttree.tree import MAX_DEPTH

DEPTH = 8
"""Levels of dynamic trees; below them a tree goes on as a chain of copies alone."""

# Measured acceptance rates on Spec-Bench prompts: candidates of the adjacency matrix and of the
# bigram table by rank, and copies by the length of the match, in the buckets of `copies.LENGTHS`.
ROW_PRIORS = (0.30, 0.083, 0.055, 0.037, 0.025, 0.02, 0.012, 0.009)
BIGRAM_PRIORS = (0.487, 0.098, 0.045, 0.04, 0.023, 0.017, 0.011, 0.010)
MATCH_PRIORS = (0.15, 0.4, 0.6, 0.7, 0.75, 0.85, 0.88, 0.91, 0.94, 0.96, 0.97)
BIGRAM_WEIGHT = 0.85
SHORTER_MATCH = 0.25
"""Acceptance rate of a copy of a shorter match, as a share of that of a longest match."""


def tree_depth(num_draft_tokens: int) -> int:
    """Greatest depth of a node in a dynamic tree of `num_draft_tokens`."""
    return max(DEPTH, min(num_draft_tokens, MAX_DEPTH))


def expected_priors() -> torch.Tensor:
    """Prior acceptance rate of each candidate source, `float32 [NUM_SOURCES]`."""
    row = torch.tensor((0.0, *ROW_PRIORS))
    bigram = torch.tensor((0.0, *BIGRAM_PRIORS))[:, None]
    tables = torch.cat((BIGRAM_WEIGHT * bigram + (1 - BIGRAM_WEIGHT) * row, row[None]))
    # Matches in the text and in the memory start from the same rates.
    longest = torch.tensor(MATCH_PRIORS * 2)
    copied = torch.cat((longest, SHORTER_MATCH * longest))[:, None, None]
    # The other candidates share the probability that the copy leaves; the copy itself may also be
    # one of the tables' candidates, in which case it gets both.
    copies = copied + (1 - copied) * tables
    others = (1 - longest[:, None, None]) * tables
    return torch.cat((tables[None], copies, others)).reshape(NUM_SOURCES)


assert (COPY_STATES, BIGRAM_STATES, ROW_STATES) == (1 + 6 * BUCKETS, TOP + 2, TOP + 1)
assert len(MATCH_PRIORS) == BUCKETS
