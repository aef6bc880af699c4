"""Sampling the levels of a draft tree without replacement (RSD, arXiv 2402.14160, section 3.2).

The Gumbel-top-k trick turns sampling into ranking: the k largest of `log p + noise` are k tokens
sampled one after another without replacement, in sampling order. Without noise they are the k most
likely tokens. B is the batch size, W the number of nodes of a level, V the vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tree_kernels.gumbel_top import Perturbed


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


def branch(level: Level, children: Perturbed) -> Level:
    """Sample children under every node (RSD-C, algorithms 4 and 5).

    Args:
        level: The level above.
        children: As many tokens after each node, with their perturbed log-probabilities.
    """
    perturbed, tokens = _below(level, children), children.tokens
    found = torch.isfinite(perturbed)
    parents = torch.arange(tokens.shape[1], device=tokens.device)[:, None].expand_as(tokens)
    return _compact(
        Level(
            tokens=tokens.int().masked_fill(~found, -1).flatten(1),
            parents=parents.flatten(1),
            log_probs=(level.log_probs[:, :, None] + children.log_probs.double()).flatten(1),
            scores=perturbed.double().flatten(1),
        )
    )


def beam(level: Level, children: Perturbed, width: int, sampled: Tensor) -> Level:
    """Keep the `width` best children of all nodes (RSD-S, stochastic beam search; algorithm 9).

    A child's score is its perturbed path log-probability, conditioned on the best of its siblings
    having its parent's score. The `width` best of all scores are then paths sampled without
    replacement (Kool et al., arXiv 1903.06059, section 4).

    Args:
        level: The level above.
        children: The best tokens after each node, `width` or all, with their perturbed
            log-probabilities; these are plain ones to take the most likely paths.
        width: Number of nodes to keep, in the order in which they are sampled.
        sampled: `bool [B]`, whether each request is sampled; the scores of the others are plain
            log-probabilities.
    """
    perturbed, tokens = _below(level, children), children.tokens
    width = min(width, tokens.shape[1] * tokens.shape[2])
    found = torch.isfinite(perturbed)
    log_probs = level.log_probs[:, :, None] + children.log_probs.double()
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


def _below(level: Level, children: Perturbed) -> Tensor:
    """The children's perturbed log-probabilities, `float32 [B, W, K]`; -inf under no node."""
    return children.values.masked_fill((level.tokens < 0)[:, :, None], -torch.inf)


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
