"""Stable selection of the highest scores, for Triton kernels: equal scores keep their order."""

from __future__ import annotations

from tree_kernels._triton import jit, tl


@jit
def best_of_rows(
    token: tl.tensor,
    source: tl.tensor,
    score: tl.tensor,
    lane: tl.tensor,
    W: tl.constexpr,
    TOP: tl.constexpr,
    LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The TOP highest-scoring candidates of each row `[W, L]`, best first.

    Args:
        token: Int32 `[W, LANES]`, the candidates.
        source: Int32 `[W, LANES]`, the source of each candidate.
        score: Float32 `[W, LANES]`, not negative.
        lane: `[1, LANES]`, the numbers from 0 to LANES - 1.

    Returns:
        Tokens, sources and scores `[W, TOP]`.
    """
    ranks = tl.arange(0, TOP)[None, :]
    tokens = tl.full([W, TOP], -1, tl.int32)
    sources = tl.full([W, TOP], 0, tl.int32)
    scores = tl.full([W, TOP], 0.0, tl.float32)
    for rank in range(TOP):
        best = tl.max(score, 1)
        # Ties go to the first candidate; candidates are in the order of their sources.
        at = tl.min(tl.where(score == best[:, None], lane, LANES), 1)
        here = lane == at[:, None]
        tokens = tl.where(ranks == rank, tl.sum(tl.where(here, token, 0), 1)[:, None], tokens)
        sources = tl.where(ranks == rank, tl.sum(tl.where(here, source, 0), 1)[:, None], sources)
        scores = tl.where(ranks == rank, best[:, None], scores)
        score = tl.where(here, -1.0, score)
    return tokens, sources, scores


@jit
def count_better(scores: tl.tensor, W: tl.constexpr, TOP: tl.constexpr) -> tl.tensor:
    """The number of scores in `[W, TOP]` that rank before each of them, int32 `[W * TOP]`.

    Equal scores rank in row-major order.
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
