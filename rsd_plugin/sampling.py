"""Drawing the levels of a draft tree without replacement (RSD, arXiv 2402.14160, section 3.2).

Gumbel noise turns drawing into ranking: the best k of `log p + noise` are k tokens drawn one after
another without replacement, in the order of drawing. Without noise they are the k most likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """The nodes of one level, the children of a parent side by side in the order of drawing.

    Attributes:
        tokens: `int32 [B, W]`; -1 where there is no node, always behind those that are.
        parents: `int64 [B, W]`, the column of each node's parent in the level before.
        log_probs: `float64 [B, W]`, the draft model's of the path from the root.
        scores: `float64 [B, W]`, the perturbed log-probabilities; -inf where there is no node.
    """

    tokens: Tensor
    parents: Tensor
    log_probs: Tensor
    scores: Tensor

    @classmethod
    def root(cls, tokens: Tensor) -> Level:
        """The level of the roots, `int32 [B]`."""
        zeros = torch.zeros(len(tokens), 1, dtype=torch.float64, device=tokens.device)
        return cls(tokens[:, None], torch.zeros_like(zeros, dtype=torch.int64), zeros, zeros)


def branch(level: Level, log_p: Tensor, noise: Tensor, width: int) -> Level:
    """Draw `width` children under every node (RSD-C, algorithms 4 and 5).

    Args:
        log_p: float32 `[B, W, V]`, the draft model's log-probabilities after each node.
        noise: float32 `[B, W, V]`, standard Gumbel noise, or zeros to take the most likely.
    """
    perturbed, tokens = _best(level, log_p, noise, width)
    found = torch.isfinite(perturbed)
    own = log_p.gather(2, tokens).double()
    parents = torch.arange(tokens.shape[1], device=tokens.device)[:, None].expand_as(tokens)
    return _close_up(
        Level(
            tokens=tokens.int().masked_fill(~found, -1).flatten(1),
            parents=parents.flatten(1),
            log_probs=(level.log_probs[:, :, None] + own).flatten(1),
            scores=perturbed.double().flatten(1),
        )
    )


def beam(level: Level, log_p: Tensor, noise: Tensor, width: int, drawn: Tensor) -> Level:
    """Keep the `width` best children of all nodes (RSD-S, stochastic beam search; algorithm 9).

    A child's score is its perturbed path log-probability, conditioned on the best of its siblings
    having its parent's score. The `width` best of all scores are then paths drawn without
    replacement (Kool et al., arXiv 1903.06059, section 4).

    Args:
        log_p, noise: as for `branch`.
        drawn: bool `[B]`: rows that are drawn; in the others the scores are the log-probabilities.
    """
    width = min(width, log_p.shape[1] * log_p.shape[2])
    perturbed, tokens = _best(level, log_p, noise, min(width, log_p.shape[2]))
    found = torch.isfinite(perturbed)
    own = log_p.gather(2, tokens).double()
    log_probs = level.log_probs[:, :, None] + own
    noisy = level.log_probs[:, :, None] + perturbed.double()
    scores = torch.where(drawn[:, None, None], _condition(level.scores, noisy), log_probs)
    scores = scores.masked_fill(~found, -torch.inf).flatten(1)
    best, at = scores.topk(width, dim=1)
    # Back into the order of parents, and of scores below each: a parent's children are neighbours.
    parents = at // tokens.shape[2]
    order = parents.masked_fill(~torch.isfinite(best), scores.shape[1])
    order = order.sort(dim=1, stable=True).indices
    best, at = best.gather(1, order), at.gather(1, order)
    return Level(
        tokens=tokens.flatten(1).gather(1, at).int().masked_fill(~torch.isfinite(best), -1),
        parents=at // tokens.shape[2],
        log_probs=log_probs.flatten(1).gather(1, at),
        scores=best,
    )


def _best(level: Level, log_p: Tensor, noise: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` of each node's perturbed log-probabilities and their tokens, in order."""
    missing = (level.tokens < 0)[:, :, None]
    perturbed = (log_p + noise).masked_fill(missing, -torch.inf)
    top = perturbed.topk(min(count, log_p.shape[2]), dim=2)
    return top.values, top.indices


def _condition(parent: Tensor, noisy: Tensor) -> Tensor:
    """Shift each family's noisy scores so that its best has the parent's score.

    `-log(exp(-parent) - exp(-best) + exp(-noisy))` in the form of Kool et al., appendix B.3, whose
    float64 keeps the tail: differences of exponentials that are nearly equal never form.

    Args:
        parent: float64 `[B, W]`.
        noisy: float64 `[B, W, K]`, best first; -inf where there is none.
    """
    parent = parent[:, :, None]
    best = noisy[:, :, :1]
    # The best itself would give log1p(-1): it has the parent's score by definition.
    gap = parent - noisy + torch.log1p(-torch.exp(noisy - best))
    shifted = parent - gap.clamp(min=0) - torch.log1p(torch.exp(-gap.abs()))
    return torch.where(noisy == best, parent, shifted)


def _close_up(level: Level) -> Level:
    """Bring the nodes that are missing behind those that are there."""
    order = (level.tokens < 0).to(torch.int8).sort(dim=1, stable=True).indices
    return Level(
        tokens=level.tokens.gather(1, order),
        parents=level.parents.gather(1, order),
        log_probs=level.log_probs.gather(1, order),
        scores=level.scores.gather(1, order),
    )
