"""Traversal verification: a tree verified from its leaves to its root (arXiv 2505.12398)."""

from __future__ import annotations

from torch import Tensor

from scripts.experiments.rsd.rsd_expectation import Children, Distributions, NodePath, Stop


def traversal(children: Children, target: Distributions, draft: Distributions) -> list[Stop]:
    """How a step can end under traversal verification (arXiv 2505.12398, algorithm 2).

    Nodes are tried depth first, each after its descendants. A node has the weight
    `w = min(1, w_parent q(x) / p(x))`, and the root 1. A node without children left is accepted
    with probability w, together with its path. If it is rejected, its parent changes to

        S = sum(max(w q - p, 0)),  q <- max(w q - p, 0) / S,  w <- S / (S + 1 - w),

    and p loses the rejected token. On a chain this is block verification; on a tree of one level
    it is recursive rejection. What is tried next is certain, so the law of the step is one list.

    The probability that a node or anything below it is accepted is its weight on average over what
    is drawn below it, however many nodes that are. So it suffices that each child, where there is
    one, is a draw without replacement given its earlier siblings. This holds for RSD-C's trees and
    for RSD-S's beams, in which siblings' descendants compete; the tests enumerate both.

    Args:
        children: The tree, with children in the order in which they were drawn.
        target: The target's distribution after a node; leaves are not asked for.
        draft: The draft model's distribution after a node.
    """
    stops: list[Stop] = []

    def visit(path: NodePath, weight: float, reached: float) -> float:
        """Try a node and all below it; returns the probability that all are rejected."""
        q: Tensor | None = None
        tokens = children.get(path, ())
        if tokens:
            q, p = target(path), draft(path).clone()
        for token in tokens:
            assert q is not None
            ratio = float(q[token] / p[token]) if float(q[token]) > 0 else 0.0
            reached = visit((*path, token), min(1.0, weight * ratio), reached)
            if reached <= 0:
                return 0.0
            residual = (weight * q - p).clamp_min(0)
            mass = float(residual.sum())
            if mass > 0:
                q, weight = residual / mass, mass / (mass + (1.0 - weight))
            elif weight < 1:
                # The draft model covers the rest of the target, and this node's path is rejected.
                weight = 0.0
            p[token] = 0.0
            p /= p.sum().clamp_min(1e-30)
        if weight > 0:
            stops.append(Stop(path, reached * weight, q))
        return reached * (1.0 - weight)

    visit((), 1.0, 1.0)
    return stops
