"""Sampling the levels of a draft tree without replacement (RSD, arXiv 2402.14160, section 3.2).

The Gumbel-top-k trick turns sampling into ranking: the k largest of `log p + noise` are k tokens
sampled one after another without replacement, in sampling order. Without noise they are the k most
likely tokens. B is the batch size, W the number of nodes of a level, V the vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tree_kernels.beam import best_children
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

    Args:
        level: The level above.
        children: The best tokens after each node, `width` or all, with their perturbed
            log-probabilities; these are plain ones to take the most likely paths.
        width: Number of nodes to keep, in the order in which they are sampled, so that a level
            without its last nodes is a beam too.
        sampled: `bool [B]`, whether each request is sampled; the scores of the others are plain
            log-probabilities.
    """
    return Level(*best_children(level.scores, level.log_probs, sampled, children, width))
