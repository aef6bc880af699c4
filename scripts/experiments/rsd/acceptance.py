"""Rules that accept one of the children of a node; `rsd_expectation.walk` applies them to a tree.

Each takes the target's distribution q and the draft model's p, `float [V]`, and the children's
tokens in the order in which they were drawn. It returns the probability that each child is
accepted, and the weights `float [V]` of the token that follows if none is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def recursive_rejection(
    target: Tensor, draft: Tensor, children: Sequence[int]
) -> tuple[list[float], Tensor]:
    """RSD's rule, for children drawn without replacement (arXiv 2402.14160, algorithm 3)."""
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
        q = residual
        if reached <= 0:
            break
        p = p.clone()
        p[token] = 0.0
    return accepted + [0.0] * (len(children) - len(accepted)), q


def k_sequential(
    target: Tensor, draft: Tensor, children: Sequence[int]
) -> tuple[list[float], Tensor]:
    """SpecTr's rule K-SEQ, for K children drawn independently (arXiv 2310.15141, algorithm 3).

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
    common = (target / high).minimum(draft)
    beta = float(common.sum())
    accepted: list[float] = []
    reached = 1.0
    for token in children:
        taken = min(1.0, float(target[token] / (high * draft[token])))
        accepted.append(reached * taken)
        reached *= 1.0 - taken
    # Disjoint distributions share no mass, and then no child is ever accepted.
    shared = (1.0 - (1.0 - beta) ** count) / beta if beta > 0 else 0.0
    return accepted, (target - shared * common).clamp_min(0)


def target_draw(
    target: Tensor, draft: Tensor, children: Sequence[int]
) -> tuple[list[float], Tensor]:
    """Draw the next token from the target, and accept the child that it is.

    It suits any tree, however its tokens were chosen, and it is the only rule here whose output for
    a seed is that of plain decoding. The draft distribution is not used.
    """
    residual = target.clone()
    residual[list(children)] = 0.0
    return target[list(children)].tolist(), residual


def greedy_drafting(
    target: Tensor, draft: Tensor, children: Sequence[int]
) -> tuple[list[float], Tensor]:
    """The optimal rule if only the last child was drawn (arXiv 2502.18779, greedy draft sampling).

    The other children were chosen, as the most likely tokens of the draft model. The last one was
    drawn from p', the draft model's distribution over the remaining tokens. It is accepted with
    probability `min(1, q / p')`; else the next token is drawn from `max(q - p', 0)`, which may be a
    chosen child. Some child is accepted with the largest probability that any rule reaches for such
    children: the chosen ones' mass in q, and `sum(min(q, p'))` over the remaining tokens.
    """
    *chosen, drawn = children
    p = draft.clone()
    p[chosen] = 0.0
    p = p / p.sum()
    taken = min(1.0, float(target[drawn] / p[drawn]))
    residual = (target - p).clamp_min(0)
    mass = float(residual.sum())
    if mass <= 0:
        # The target is p', so only rounding can reject the drawn child.
        return [0.0] * len(chosen) + [1.0], residual
    accepted = [(1.0 - taken) * share for share in (residual[chosen] / mass).tolist()]
    residual[chosen] = 0.0
    return [*accepted, taken], residual
