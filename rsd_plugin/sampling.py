"""Sampling the levels of a draft tree without replacement (RSD, arXiv 2402.14160, section 3.2).

The Gumbel-top-k trick turns sampling into ranking: the k largest of `log p + noise` are k tokens
sampled one after another without replacement, in sampling order. Without noise they are the k most
likely tokens. B is the batch size, W the number of nodes of a level, V the vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """The nodes of one level; the children of a node are in sampling order.

    Attributes:
        tokens: `int32 [B, W]`, padded at the end with -1.
        parents: `int64 [B, W]`, the column of each node's parent in the level above.
        log_probs: `float64 [B, W]`, log-probability of the path from the root in the draft model.
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

    def chances(self, above: Level) -> Tensor:
        """The probability of each node given its parent, `float32 [B, W]`; 0 without a node.

        Args:
            above: The level above.
        """
        chances = (self.log_probs - above.log_probs.gather(1, self.parents)).exp()
        return chances.float().masked_fill(self.tokens < 0, 0)


def branch(level: Level, log_p: Tensor, noise: Tensor, width: int) -> Level:
    """Sample `width` children under every node (RSD-C, algorithms 4 and 5).

    Args:
        level: The level above.
        log_p: `float32 [B, W, V]`, the draft model's log-probabilities after each node.
        noise: `float32 [B, W, V]`, standard Gumbel noise, or zeros to take the most likely tokens.
        width: Number of children of each node.
    """
    perturbed, tokens = _best(level, log_p, noise, width)
    found = torch.isfinite(perturbed)
    child_log_p = log_p.gather(2, tokens).double()
    parents = torch.arange(tokens.shape[1], device=tokens.device)[:, None].expand_as(tokens)
    return _compact(
        Level(
            tokens=tokens.int().masked_fill(~found, -1).flatten(1),
            parents=parents.flatten(1),
            log_probs=(level.log_probs[:, :, None] + child_log_p).flatten(1),
            scores=perturbed.double().flatten(1),
        )
    )


def beam(level: Level, log_p: Tensor, noise: Tensor, width: int, sampled: Tensor) -> Level:
    """Keep the `width` best children of all nodes (RSD-S, stochastic beam search; algorithm 9).

    A child's score is its perturbed path log-probability, conditioned on the best of its siblings
    having its parent's score. The `width` best of all scores are then paths sampled without
    replacement (Kool et al., arXiv 1903.06059, section 4).

    Args:
        level: The level above.
        log_p: `float32 [B, W, V]`, the draft model's log-probabilities after each node.
        noise: `float32 [B, W, V]`, standard Gumbel noise, or zeros to take the most likely paths.
        width: Number of nodes to keep, in the order in which they are sampled.
        sampled: `bool [B]`, whether each request is sampled; the scores of the others are plain
            log-probabilities.
    """
    width = min(width, log_p.shape[1] * log_p.shape[2])
    perturbed, tokens = _best(level, log_p, noise, min(width, log_p.shape[2]))
    found = torch.isfinite(perturbed)
    child_log_p = log_p.gather(2, tokens).double()
    log_probs = level.log_probs[:, :, None] + child_log_p
    noisy = level.log_probs[:, :, None] + perturbed.double()
    scores = torch.where(sampled[:, None, None], _condition(level.scores, noisy), log_probs)
    scores = scores.masked_fill(~found, -torch.inf).flatten(1)
    # Best first, so that a level without its last nodes is a beam too.
    best, at = scores.topk(width, dim=1)
    return Level(
        tokens=tokens.flatten(1).gather(1, at).int().masked_fill(~torch.isfinite(best), -1),
        parents=at // tokens.shape[2],
        log_probs=log_probs.flatten(1).gather(1, at),
        scores=best,
    )


def _best(level: Level, log_p: Tensor, noise: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest perturbed log-probabilities after each node, and their tokens."""
    missing = (level.tokens < 0)[:, :, None]
    perturbed = (log_p + noise).masked_fill(missing, -torch.inf)
    top = perturbed.topk(min(count, log_p.shape[2]), dim=2)
    return top.values, top.indices


def _condition(parent: Tensor, noisy: Tensor) -> Tensor:
    """Shift the noisy scores of each node's children so that the best has the node's score.

    `-log(exp(-parent) - exp(-best) + exp(-noisy))` in the form of Kool et al., appendix B.3, which
    is stable in float64: it never subtracts exponentials that are nearly equal.

    Args:
        parent: `float64 [B, W]`, the nodes' scores.
        noisy: `float64 [B, W, K]`, best first; -inf where there is no child.
    """
    parent = parent[:, :, None]
    best = noisy[:, :, :1]
    # For the best child this is log1p(-1); its score is the parent's by definition.
    gap = parent - noisy + torch.log1p(-torch.exp(noisy - best))
    shifted = parent - gap.clamp(min=0) - torch.log1p(torch.exp(-gap.abs()))
    return torch.where(noisy == best, parent, shifted)


def _compact(level: Level) -> Level:
    """Move empty columns to the end."""
    order = (level.tokens < 0).to(torch.int8).sort(dim=1, stable=True).indices
    return Level(
        tokens=level.tokens.gather(1, order),
        parents=level.parents.gather(1, order),
        log_probs=level.log_probs.gather(1, order),
        scores=level.scores.gather(1, order),
    )
