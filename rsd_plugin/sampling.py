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
        log_probs: `float64 [B, W]`, log-probability of the path from the root in the draft model;
            -inf where there is no node.
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
    tokens, above = children.tokens, level.log_probs[:, :, None]
    scores = (above + children.values).flatten(1)
    gone = scores == -torch.inf
    # Empty columns go to the end.
    order = gone.to(torch.int8).sort(dim=1, stable=True).indices
    return Level(
        tokens=tokens.flatten(1).masked_fill(gone, -1).gather(1, order).int(),
        parents=order // tokens.shape[2],
        log_probs=(above + children.log_probs).flatten(1).gather(1, order),
        scores=scores.gather(1, order),
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
    tokens, above = children.tokens, level.log_probs[:, :, None]
    width = min(width, tokens.shape[1] * tokens.shape[2])
    log_probs = above + children.log_probs
    noisy = above + children.values
    scores = torch.where(sampled[:, None, None], _condition(level.scores, noisy), log_probs)
    # Best first, so that a level without its last nodes is a beam too.
    best, at = scores.flatten(1).topk(width, dim=1)
    return Level(
        tokens=tokens.flatten(1).gather(1, at).masked_fill(best == -torch.inf, -1).int(),
        parents=at // tokens.shape[2],
        log_probs=log_probs.flatten(1).gather(1, at),
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
