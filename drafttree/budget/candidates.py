"""The sizes to choose from, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from drafttree.arrays import FloatArray, LongArray
from drafttree.budget.tree_choice import TreeChoice


def checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The candidate sizes.

    Raises:
        ValueError: They do not start at 0 or do not ascend.
    """
    if list(sizes[:1]) != [0] or any(a >= b for a, b in pairwise(sizes)):
        raise ValueError(f"candidate_sizes={list(sizes)}: sizes must start at 0 and ascend")
    return tuple(sizes)


def drafted(scores: FloatArray, choice: TreeChoice) -> tuple[LongArray, FloatArray]:
    """How many draft tokens each request has, and how many of them it is expected to accept.

    Args:
        scores: `[R, M]`, the probability that each node is accepted, the best first; 0 where there
            is none.
        choice: The trees, which take their nodes best first.
    """
    size = choice.num_draft_tokens
    taken = scores > 0
    taken[:, size:] &= scores[:, size:] >= choice.min_score
    taken[:, size + choice.spine :] = False
    return taken.sum(1), (scores * taken).sum(1)


def best_size(
    gains: FloatArray, expected: FloatArray, seconds: FloatArray, margin: float
) -> tuple[int, FloatArray]:
    """The index of the size with the lowest mean time per token.

    Args:
        gains: `[S]`, harmonic mean over the requests of the tokens that each emits.
        expected: `[S]`, mean tokens that the drafter expects.
        seconds: `[S]`, predicted mean seconds of a step.
        margin: Factor by which a size with drafts has to exceed plain decoding.

    Returns:
        The index, and `[S]`, the tokens per second of a request; 0 for sizes that add no drafts,
        which are never chosen, whatever their predicted cost.
    """
    rates = gains / seconds
    rates[1:][np.diff(expected) <= 0] = 0.0
    best = int(rates.argmax())
    return (best if rates[best] > margin * rates[0] else 0), rates
