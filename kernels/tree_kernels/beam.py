"""The next level of beams: the best children of all nodes of a level (stochastic beam search).

A child's score is its perturbed path log-probability, conditioned on the best of its siblings
having its parent's score. The best of all scores are then paths sampled without replacement (Kool
et al., arXiv 1903.06059, section 4; RSD-S, arXiv 2402.14160, algorithm 9).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.gumbel_top import Perturbed

# Beyond it, sorting is faster than what the kernel does.
_MOST = 4096


class BeamLevel(NamedTuple):
    """The nodes of a level, best first.

    Attributes:
        tokens: `int32 [B, W]`; -1 where there is no node.
        parents: `int64 [B, W]`, the place of each node's parent in the level above; arbitrary where
            there is no node.
        log_probs: `float64 [B, W]`, log-probabilities of the paths; -inf where there is no node.
        scores: `float64 [B, W]`; -inf where there is no node.
    """

    tokens: Tensor
    parents: Tensor
    log_probs: Tensor
    scores: Tensor


@jit(do_not_specialize=["width"])
def _beam_kernel(
    scores: tl.tensor,
    log_probs: tl.tensor,
    draws: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    child_log_probs: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_log_probs: tl.tensor,
    out_scores: tl.tensor,
    nodes: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    NODES: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    """Score the children of a request's nodes, and take the best; one program per request."""
    request = tl.program_id(0).to(tl.int64)
    none = -float("inf")
    node = tl.arange(0, NODES)[:, None]
    child = tl.arange(0, COUNT)[None, :]
    is_node, is_child = node < nodes, (node < nodes) & (child < count)
    place = node * count + child
    parent = tl.load(scores + request * nodes + node, mask=is_node, other=none)
    above = tl.load(log_probs + request * nodes + node, mask=is_node, other=none)
    family = request * nodes * count
    value = tl.load(values + family + place, mask=is_child, other=none).to(tl.float64)
    first = tl.load(values + family + node * count, mask=is_node, other=none).to(tl.float64)
    plain = tl.load(child_log_probs + family + place, mask=is_child, other=none).to(tl.float64)
    path = above + plain
    exists = (above > none) & (value > none)
    noisy = tl.where(exists, above + value, 0.0)
    best = tl.where(exists, above + first, 0.0)
    # As in `_condition`; the best child has its parent's score.
    below = 1.0 - tl.exp(noisy - best)
    is_best = below <= 0.0
    gap = parent - noisy + tl.log(tl.where(is_best, 1.0, below))
    grown = tl.log(1.0 + tl.exp(tl.minimum(gap, 40.0)))
    shifted = parent - tl.where(gap > 40.0, gap, grown)
    shifted = tl.where(exists, tl.where(is_best, parent, shifted), none)
    score = tl.where(tl.load(draws + request) != 0, shifted, path)
    left = is_child
    for rank in range(width):
        key = tl.where(left, score, none)
        top = tl.max(tl.max(key, 1), 0)
        taken = tl.min(tl.min(tl.where(left & (key == top), place, NODES * COUNT), 1), 0)
        here = place == taken
        left = left & (taken != place)
        out = request * width + rank
        token = tl.load(tokens + family + taken).to(tl.int32)
        tl.store(out_tokens + out, tl.where(top > none, token, -1))
        tl.store(out_parents + out, (taken // count).to(tl.int64))
        tl.store(out_log_probs + out, tl.max(tl.max(tl.where(here, path, none), 1), 0))
        tl.store(out_scores + out, top)


def _triton(
    scores: Tensor, log_probs: Tensor, draws: Tensor, children: Perturbed, width: int
) -> BeamLevel:
    batch, nodes, count = children.values.shape
    if nodes * count > _MOST:
        return _reference(scores, log_probs, draws, children, width)
    shape, device = (batch, width), scores.device
    out = BeamLevel(
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.float64, device=device),
        torch.empty(shape, dtype=torch.float64, device=device),
    )
    if batch:
        _beam_kernel[(batch,)](
            *(scores, log_probs, draws, *(each.contiguous() for each in children), *out),
            *(nodes, count, width),
            NODES=next_power_of_2(nodes),
            COUNT=next_power_of_2(count),
        )
    return out


def _reference(
    scores: Tensor, log_probs: Tensor, draws: Tensor, children: Perturbed, width: int
) -> BeamLevel:
    tokens, above = children.tokens, log_probs[:, :, None]
    paths = above + children.log_probs
    shifted = _condition(scores, above + children.values)
    best, at = torch.where(draws[:, None, None], shifted, paths).flatten(1).topk(width, dim=1)
    return BeamLevel(
        tokens=tokens.flatten(1).gather(1, at).masked_fill(best == -torch.inf, -1).int(),
        parents=at // tokens.shape[2],
        log_probs=paths.flatten(1).gather(1, at),
        scores=best,
    )


def _condition(parent: Tensor, noisy: Tensor) -> Tensor:
    """Shift the noisy scores of each node's children so that the best has the node's score.

    `-log(exp(-parent) - exp(-best) + exp(-noisy))` in the form of Kool et al., appendix B.3, which
    is stable in float64: it never subtracts exponentials that are nearly equal.

    Args:
        parent: `float64 [B, W]`, the nodes' scores.
        noisy: `float64 [B, W, K]`, best first; -inf where there is no child.

    Returns:
        `float64 [B, W, K]`; -inf where there is no child.
    """
    parent = parent[:, :, None]
    # For the best child this is log1p(-1); its score is then its parent's.
    gap = parent - noisy + torch.log1p(-torch.exp(noisy - noisy[:, :, :1]))
    # Beyond 40, the logarithm of 1 + exp(gap) is the gap.
    scores = parent - torch.nn.functional.softplus(gap, threshold=40.0)
    return torch.nan_to_num(scores, nan=-torch.inf, neginf=-torch.inf)


_BEAM = Op("beam.best_children", _reference, triton=_triton)


def best_children(
    scores: Tensor, log_probs: Tensor, draws: Tensor, children: Perturbed, width: int
) -> BeamLevel:
    """Take the best children of all nodes of a level.

    Args:
        scores: `float64 [B, N]`, the nodes' scores; -inf where there is no node.
        log_probs: `float64 [B, N]`, log-probabilities of their paths; -inf where there is no node.
        draws: `bool [B]`, whether each request is sampled; the scores of the others are their
            paths' log-probabilities, and the most likely ones are taken.
        children: The best tokens after each node.
        width: Number of nodes of the next level, W; there are as many children or fewer.

    Raises:
        ValueError: Shapes or types do not fit.
    """
    batch, nodes = scores.shape
    shapes = {each.shape for each in children}
    width = min(width, nodes * children.values.shape[-1])
    if (
        shapes != {(batch, nodes, children.values.shape[-1])}
        or log_probs.shape != scores.shape
        or draws.shape != (batch,)
        or {scores.dtype, log_probs.dtype} != {torch.float64}
        or draws.dtype != torch.bool
    ):
        raise ValueError(
            f"scores {scores.dtype} {[*scores.shape]}, log_probs {log_probs.dtype} "
            f"{[*log_probs.shape]}, draws {draws.dtype} {[*draws.shape]} and children of shapes "
            f"{[list(each) for each in shapes]} must be float64 [B, N] twice, bool [B] and "
            "[B, N, K]"
        )
    given = scores.contiguous(), log_probs.contiguous(), draws.contiguous()
    return _BEAM.on(scores)(*given, children, width)
