"""Further draft tokens for the requests whose text is nearly certain.

All requests of a batch have the same number of draft tokens, though the drafts of one may copy a
long text that is nearly certain while those of the others are guesses. So requests take further
nodes whose probability of acceptance is worth their cost.

All B requests wait while a further node is verified. In return, its request is spared the part of a
step that the token would take otherwise: with g tokens a step of T seconds, T / g seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from drafttree.arrays import FloatArray


@dataclass(frozen=True)
class Spine:
    """Further nodes of the trees in a step.

    Attributes:
        nodes: Most further nodes of a request.
        min_score: Least score of a further node.
        tokens: `[R]`, tokens that each request is expected to emit with its further nodes.
        rows: Rows of the step.
        seconds: Predicted seconds of the step.
    """

    nodes: int
    min_score: float
    tokens: FloatArray
    rows: int
    seconds: float


def worthwhile_spine(
    scores: FloatArray,
    tokens: FloatArray,
    lengths: Sequence[int],
    ratios: FloatArray,
    batch_size: int,
    rows: int,
    seconds: Callable[[int], float],
    margin: float,
    plain_rate: float,
) -> Spine | None:
    """The further nodes that save the most time for the requests together.

    Args:
        scores: `[R, M]`, scores of the nodes that are left, the best first.
        tokens: `[R]`, tokens that each request is expected to emit without further nodes.
        lengths: Numbers of further nodes to choose from, ascending, at most M.
        ratios: `[R]`, ratio of the probability of acceptance to the score. `min_score` is
            the same for all requests and follows from the ratio of the one with the best node.
        batch_size: Number of requests in the step.
        rows: Rows of the step without further nodes.
        seconds: Predicted seconds of a step by its rows.
        margin: Factor by which further nodes have to be better than none.
        plain_rate: Tokens per second of plain decoding. With further nodes the harmonic mean over
            the requests must exceed it, so that those that have none do not wait too long.

    Returns:
        The further nodes; None if none are worth their cost.
    """
    if not lengths:
        return None
    now = seconds(rows)
    cost_of_row = (seconds(rows + lengths[-1]) - now) / lengths[-1]
    most_certain = float(ratios[scores[:, 0].argmax()])
    min_score = batch_size * cost_of_row * float(tokens.max()) / (now * most_certain)
    if scores[:, 0].max() < min_score:
        return None
    counts = (scores >= min_score).sum(1)
    sums = np.cumsum(scores, 1) * ratios[:, None]
    best, most_saved = None, (margin - 1) * now
    for length in lengths:
        taken = np.minimum(counts, length)
        further = np.where(taken > 0, sums[np.arange(len(sums)), taken - 1], 0.0)
        # Scores may be those of an earlier step, of another number of requests.
        total = rows + round(float(taken.mean()) * batch_size)
        later = seconds(total)
        saved = float((further / tokens).mean()) * now - (later - now)
        emitted = tokens + further
        if saved > most_saved and 1 / float((1 / emitted).mean()) > margin * plain_rate * later:
            best, most_saved = Spine(length, min_score, emitted, total, later), saved
        if length >= counts.max():
            break
    return best
