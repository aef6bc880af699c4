"""Verification of a whole chain at once, and of the best of several independent chains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.experiments.rsd.rsd_expectation import Distributions, NodePath, Stop


def block_verification(
    target: Tensor, draft: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify chains as blocks (arXiv 2403.10444, algorithm 2).

    With `w_0 = 1` and `w_i = min(1, w_{i-1} q(x_i) / p(x_i))`, a prefix of `i < L` tokens is
    accepted with probability `S_i / (S_i + 1 - w_i)`, where `S_i = sum(max(w_i q - p, 0))` over the
    token after it, and the whole chain with probability `w_L`. The longest accepted prefix counts.

    Args:
        target: `float [B, L, V]`, the target's distributions after each prefix of each chain,
            without that after the whole chain.
        draft: `float [B, L, V]`, the distributions that the tokens were drawn from.
        tokens: `int64 [B, L]`, the chains.

    Returns:
        The probability that each prefix is accepted if it is tried, and the probability that
        exactly this prefix is kept, both `float [B, L + 1]`; and weights `float [B, L, V]` of the
        token that follows a kept prefix. The target's own distribution follows the whole chain.
    """
    batch, length = tokens.shape
    weights = target.new_ones(batch, length + 1)
    at = tokens[:, :, None]
    ratios = (target.gather(2, at) / draft.gather(2, at))[:, :, 0]
    for i in range(length):
        weights[:, i + 1] = (weights[:, i] * ratios[:, i]).clamp_max(1.0)
    residual = (weights[:, :-1, None] * target - draft).clamp_min(0)
    mass = residual.sum(2)
    missing = mass + (1.0 - weights[:, :-1])
    # Nothing is missing if the target and the draft model agree; the prefix is then certain.
    tried = torch.where(missing > 0, mass / missing.where(missing > 0, 1.0), 1.0)
    tried = torch.cat([tried, weights[:, -1:]], 1)
    # A prefix is kept if it is accepted and no longer one is.
    longer_rejected = (1.0 - tried).flip(1).cumprod(1).roll(1, 1)
    longer_rejected[:, 0] = 1.0
    return tried, tried * longer_rejected.flip(1), residual


def verify_block(path: NodePath, target: Distributions, draft: Distributions) -> list[Stop]:
    """How a step can end if one chain is verified as a block."""
    prefixes = [path[:length] for length in range(len(path))]
    return _stops(path, torch.stack([*map(target, prefixes)]), torch.stack([*map(draft, prefixes)]))


def verify_best_chain(
    chains: Sequence[NodePath], target: Distributions, draft: Distributions
) -> list[Stop]:
    """How a step can end if the best of K independent chains is verified as a block.

    Greedy multi-path block verification (arXiv 2602.16961) selects one of the paths and applies
    block verification to it. Here the chains are compared token by token, and the larger ratio
    q / p wins: the token that the draft model underrates most. The law of the winner is known: with
    F(u) the probability that a chain does not come after the prefix u in this order, and m(u) that
    it begins with u, the winner begins with u with probability `F(u)^K - (F(u) - m(u))^K`. Block
    verification with this law as the draft distribution is lossless as for a single chain. The
    selection is our reading; the paper's may differ in it.

    Args:
        chains: K chains of the same length, drawn independently; they may coincide.
        target: The target's distribution after a node.
        draft: The draft model's distribution after a node.
    """
    count = len(chains)
    path: NodePath = ()
    targets, laws = [], []
    before, mass = 0.0, 1.0
    for depth in range(len(chains[0])):
        q, p = target(path).double(), draft(path).double()
        # Tokens that the draft model cannot draw have no mass; their place does not matter.
        order = torch.where(p > 0, q / p, -1.0).argsort(stable=True)
        sums = p[order].cumsum(0)
        below = torch.empty_like(p).scatter(0, order, sums - p[order])
        rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
        token_before, token_mass = before + mass * below, mass * p
        law = _power_difference(token_before, token_mass, count)
        laws.append(law / law.sum())
        targets.append(q)
        going = [chain for chain in chains if chain[:depth] == path]
        token = max((chain[depth] for chain in going), key=lambda token: int(rank[token]))
        path = (*path, token)
        before, mass = float(token_before[token]), float(token_mass[token])
    return _stops(path, torch.stack(targets), torch.stack(laws))


def _power_difference(low: Tensor, step: Tensor, power: int) -> Tensor:
    """`(low + step)^power - low^power`, without cancellation for small steps."""
    high = low + step
    return step * sum(high**i * low ** (power - 1 - i) for i in range(power))


def _stops(path: NodePath, target: Tensor, draft: Tensor) -> list[Stop]:
    """How a step can end for one chain with distributions `[L, V]` of the target and its law."""
    _, kept, residual = block_verification(target[None], draft[None], torch.tensor([path]))
    rows: list[Tensor | None] = [*residual[0], None]
    return [
        Stop(path[:length], probability, row)
        for length, (probability, row) in enumerate(zip(kept[0].tolist(), rows, strict=True))
        if probability > 0
    ]
