"""The best of many candidates, for Triton kernels: equal ones in their order, as a stable sort."""

from __future__ import annotations

from tree_kernels._triton import jit, tl


@jit
def best_of_rows(
    token: tl.tensor,
    origin: tl.tensor,
    score: tl.tensor,
    lane: tl.tensor,
    W: tl.constexpr,
    TOP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of each row [W, L] the TOP of highest score, best first: tokens, origins, scores [W, TOP].

    lane: [1, L], from 0 on. Scores are not negative.
    """
    ranks = tl.arange(0, TOP)[None, :]
    tokens = tl.full([W, TOP], -1, tl.int32)
    origins = tl.full([W, TOP], 0, tl.int32)
    scores = tl.full([W, TOP], 0.0, tl.float32)
    for rank in range(TOP):
        best = tl.max(score, 1)
        # Of equal ones the first: they stand in the order in which they are offered.
        at = tl.min(tl.where(score == best[:, None], lane, 2 * TOP), 1)
        here = lane == at[:, None]
        tokens = tl.where(ranks == rank, tl.sum(tl.where(here, token, 0), 1)[:, None], tokens)
        origins = tl.where(ranks == rank, tl.sum(tl.where(here, origin, 0), 1)[:, None], origins)
        scores = tl.where(ranks == rank, best[:, None], scores)
        score = tl.where(here, -1.0, score)
    return tokens, origins, scores


@jit
def count_better(scores: tl.tensor, W: tl.constexpr, TOP: tl.constexpr) -> tl.tensor:
    """How many of all scores [W, TOP] are better than each, int32 [W * TOP].

    Of equal ones the earlier is better, row by row.
    """
    ranks = tl.arange(0, TOP)[None, :]
    mine = tl.reshape(scores, [W * TOP])[:, None]
    order = tl.arange(0, W * TOP)[:, None]
    better = tl.zeros([W * TOP], tl.int32)
    for rank in range(TOP):
        other = tl.sum(tl.where(ranks == rank, scores, 0.0), 1)[None, :]
        before = (tl.arange(0, W) * TOP + rank)[None, :] < order
        better += tl.sum(((other > mine) | ((other == mine) & before)).to(tl.int32), 1)
    return better
