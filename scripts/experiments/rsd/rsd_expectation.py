"""The expected number of tokens per step for a given draft tree, as an exact sum.

It compares trees and acceptance rules without an engine. Distributions over the vocabulary are
`float [V]`, after all filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

NodePath = tuple[int, ...]
"""A node, given by the tokens on the path to it, without the root."""

Acceptance = Callable[[Tensor, Tensor, Sequence[int]], list[float]]
"""`(target, draft, children) -> probabilities`: the probability that each child is accepted."""


def expected_tokens(
    children: Mapping[NodePath, Sequence[int]],
    target: Callable[[NodePath], Tensor],
    draft: Callable[[NodePath], Tensor],
    accept: Acceptance,
) -> float:
    """The expected number of tokens of one step, including the bonus token.

    Args:
        children: The tokens of each inner node's children, in sampling order. A token may occur
            more than once; its nodes then share their descendants.
        target: The target's distribution after a node.
        draft: The draft model's distribution after a node.
        accept: The acceptance rule.
    """

    def below(path: NodePath) -> float:
        tokens = children.get(path)
        if not tokens:
            return 1.0
        taken: dict[int, float] = {}
        accepted = accept(target(path), draft(path), tokens)
        for token, probability in zip(tokens, accepted, strict=True):
            taken[token] = taken.get(token, 0.0) + probability
        return 1.0 + sum(p * below((*path, token)) for token, p in taken.items() if p > 0)

    return below(())


def recursive_rejection(target: Tensor, draft: Tensor, children: Sequence[int]) -> list[float]:
    """RSD's rule, for children sampled without replacement (arXiv 2402.14160, algorithm 3)."""
    accepted: list[float] = []
    reached = 1.0
    q, p = target, draft
    for token in children:
        q, p = q / q.sum(), p / p.sum()
        residual = (q - p).clamp_min(0)
        # If q equals p, the residual is empty and the token is always accepted.
        certain = reached > 0 and float(residual.sum()) <= 0
        taken = 1.0 if certain else min(1.0, float(q[token] / p[token]))
        accepted.append(reached * taken)
        reached *= 1.0 - taken
        if reached <= 0:
            break
        q, p = residual, p.clone()
        p[token] = 0.0
    return accepted + [0.0] * (len(children) - len(accepted))


def k_sequential(target: Tensor, draft: Tensor, children: Sequence[int]) -> list[float]:
    """SpecTr's rule K-SEQ, for K children sampled independently (arXiv 2310.15141, algorithm 3).

    Each child is accepted with probability `min(1, q / (rho p))`. The smallest valid rho is the
    root of `1 - (1 - beta)^K = rho beta` with `beta = sum(min(p, q / rho))`.
    """
    count = len(children)
    low, high = 1.0, float(count)
    for _ in range(40):
        rho = (low + high) / 2
        beta = float((target / rho).minimum(draft).sum())
        if 1.0 - (1.0 - beta) ** count > rho * beta:
            low = rho
        else:
            high = rho
    accepted: list[float] = []
    reached = 1.0
    for token in children:
        taken = min(1.0, float(target[token] / (high * draft[token])))
        accepted.append(reached * taken)
        reached *= 1.0 - taken
    return accepted
