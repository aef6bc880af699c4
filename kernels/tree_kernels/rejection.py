"""Recursive rejection sampling of one level (RSD, arXiv 2402.14160, section 3.1, algorithm 3).

A node's children were drawn without replacement from the draft distribution p. They are tried in
the order in which they were drawn. Child x is accepted with probability min(1, q(x) / p(x)); if it
is rejected, the next child is tried with

    q <- norm(max(q - p, 0)),    p <- norm(p without x).

If no child is accepted, the next token is drawn from the last q. The token that follows the node is
then distributed as the target q, for any p.

The reference and C++ sum distributions in double precision, so that they decide alike for the same
coins although they sum in different orders.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, tl

_REJECT = CppFunction("rejection.cpp", "reject_step", "ppppppiiippi")
_BLOCK = 8192


@jit
def _residual(q: tl.tensor, p: tl.tensor, q_scale: tl.tensor, p_scale: tl.tensor) -> tl.tensor:
    """What is left of the target: repeated `max(. - ., 0)` is one, as its p only loses tokens.

    A token that p loses was rejected, so nothing of it was left, and nothing comes back.
    """
    return tl.maximum(q * q_scale - p * p_scale, 0.0)


@jit
def _reject_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    target_rows: tl.tensor,
    draft_rows: tl.tensor,
    children: tl.tensor,
    coins: tl.tensor,
    accepted: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    num_children: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Try the children of a node; one program per request. Nothing is written but the outcome."""
    request = tl.program_id(0).to(tl.int64)
    draft_row = tl.load(draft_rows + request)
    q_row = target + tl.load(target_rows + request) * vocab
    p_row = draft + tl.maximum(draft_row, 0) * vocab
    p_columns = tl.where(draft_row >= 0, vocab, 0)
    line = children + request * num_children
    q_mass = 0.0
    p_mass = 0.0
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        q_mass += tl.sum(tl.load(q_row + columns, mask=columns < vocab, other=0.0))
        p_mass += tl.sum(tl.load(p_row + columns, mask=columns < p_columns, other=0.0))
    q_scale = 1.0
    p_scale = 0.0
    found = -1
    for child in range(0, num_children):
        token = tl.load(line + child)
        if (found < 0) & (token >= 0) & (draft_row >= 0):
            coin = tl.load(coins + request * (num_children + 1) + child)
            p_token = tl.load(p_row + token)
            left_of_token = _residual(tl.load(q_row + token), p_token, q_scale, p_scale)
            p_inverse = tl.where(p_mass > 0, 1.0 / tl.where(p_mass > 0, p_mass, 1.0), 0.0)
            if coin * p_token * p_inverse < left_of_token / q_mass:
                found = child
            else:
                q_scale = q_scale / q_mass
                p_scale = p_scale / q_mass + p_inverse
                q_mass = 0.0
                p_mass = 0.0
                for first in range(0, vocab, BLOCK):
                    columns = first + tl.arange(0, BLOCK)
                    q = tl.load(q_row + columns, mask=columns < vocab, other=0.0)
                    p = tl.load(p_row + columns, mask=columns < p_columns, other=0.0)
                    q_mass += tl.sum(_residual(q, p, q_scale, p_scale))
                    for tried in range(0, child + 1):
                        p = tl.where(columns == tl.load(line + tried), 0.0, p)
                    p_mass += tl.sum(p)
                # q equals p, so only rounding can have rejected the child.
                if q_mass <= 0.0:
                    found = child
    wanted = tl.load(coins + request * (num_children + 1) + num_children) * q_mass
    before = 0.0
    drawn = -1
    last = -1
    if found >= 0:
        drawn = tl.load(line + found)
    else:
        for first in range(0, vocab, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            q = tl.load(q_row + columns, mask=columns < vocab, other=0.0)
            p = tl.load(p_row + columns, mask=columns < p_columns, other=0.0)
            left = _residual(q, p, q_scale, p_scale)
            reached = (before + tl.cumsum(left, 0) > wanted) & (left > 0)
            hit = tl.min(tl.where(reached, columns, vocab))
            if (drawn < 0) & (hit < vocab):
                drawn = hit
            last = tl.maximum(last, tl.max(tl.where(left > 0, columns, -1)))
            before += tl.sum(left)
        # Due to rounding, the running sums may stay below the mass.
        if drawn < 0:
            drawn = last
    tl.store(accepted + request, found)
    tl.store(tokens + request, drawn)


def _reject_triton(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    children: Tensor,
    coins: Tensor,
) -> tuple[Tensor, Tensor]:
    requests, num_children = children.shape
    vocab = target.shape[1]
    accepted = torch.empty(requests, dtype=torch.int32, device=target.device)
    tokens = torch.empty_like(accepted)
    if requests:
        _reject_kernel[(requests,)](
            *(target.contiguous(), draft.contiguous(), target_rows, draft_rows),
            *(children.contiguous(), coins.contiguous()),
            *(accepted, tokens, vocab, num_children),
            BLOCK=_BLOCK,
            num_warps=16,
        )
    return accepted, tokens


def _reject_reference(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    children: Tensor,
    coins: Tensor,
) -> tuple[Tensor, Tensor]:
    requests, num_children = children.shape
    q = target[target_rows].float()
    p = torch.zeros_like(q)
    if len(draft):
        p = draft[draft_rows.clamp(min=0)].float() * (draft_rows >= 0)[:, None]
    accepted = torch.full((requests,), -1, dtype=torch.int32, device=q.device)
    for child in range(num_children):
        token = children[:, child].long()
        tried = (accepted < 0) & (token >= 0) & (draft_rows >= 0)
        # On a CPU this needs no synchronisation and saves passes over the vocabulary.
        if q.device.type == "cpu" and not bool(tried.any()):
            break
        at = token.clamp(min=0)[:, None]
        q_normed = q / _mass(q)
        p_normed = p / _mass(p).clamp_min(torch.finfo(p.dtype).tiny)
        taken = coins[:, child] * p_normed.gather(1, at)[:, 0] < q_normed.gather(1, at)[:, 0]
        residual = (q_normed - p_normed).clamp_min(0)
        # q equals p, so only rounding can have rejected the child.
        taken |= residual.sum(1) <= 0
        accepted = torch.where(tried & taken, child, accepted)
        rejected = (tried & ~taken)[:, None]
        q = torch.where(rejected, residual, q)
        p = torch.where(rejected, p.scatter(1, at, 0.0), p)
    sums = q.double().cumsum(1)
    wanted = coins[:, -1:].double() * sums[:, -1:]
    # The last token with mass: due to rounding, the running sums may stay below the mass.
    last = torch.where(q > 0, torch.arange(q.shape[1], device=q.device), -1).amax(1)
    drawn = torch.minimum(torch.searchsorted(sums, wanted, right=True)[:, 0], last)
    if num_children:
        chosen = children.gather(1, accepted.clamp(min=0).long()[:, None])[:, 0]
        drawn = torch.where(accepted >= 0, chosen.long(), drawn)
    return accepted, drawn.int()


def _mass(weights: Tensor) -> Tensor:
    """The sums of the rows, float32 `[B, 1]`, added in double precision."""
    return weights.sum(1, keepdim=True, dtype=torch.float64).float()


def _reject_cpp(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    children: Tensor,
    coins: Tensor,
) -> tuple[Tensor, Tensor]:
    given = (
        *(target.float().contiguous(), draft.float().contiguous()),
        *(target_rows.long().contiguous(), draft_rows.long().contiguous()),
        *(children.int().contiguous(), coins.float().contiguous()),
    )
    accepted = torch.empty(len(children), dtype=torch.int32)
    tokens = torch.empty_like(accepted)
    _REJECT.call(
        *(tensor.data_ptr() for tensor in given),
        *(*children.shape, target.shape[1], accepted.data_ptr(), tokens.data_ptr()),
        torch.get_num_threads(),
    )
    return accepted, tokens


_REJECT_STEP = Op(
    "rejection.reject_step",
    _reject_reference,
    triton=_reject_triton,
    cpp=_reject_cpp,
    needs=_REJECT,
)


def reject_step(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    children: Tensor,
    coins: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sample the token that follows one node of each request.

    Args:
        target: Float32 `[R, V]`, distributions of the target after all filters; each row sums to 1.
        draft: Float32 `[S, V]`, the distributions that the children were drawn from, after the same
            filters.
        target_rows: Int64 `[B]`, the row of `target` of each request's node.
        draft_rows: Int64 `[B]`, the row of `draft` of each request's node; -1 for a node without
            children.
        children: Int32 `[B, K]`, the tokens of the children in the order in which they were drawn,
            padded with -1 at the end.
        coins: Float32 `[B, K + 1]`, uniform in [0, 1): one for each child, and one for the draw if
            no child is accepted.

    Returns:
        The index of the accepted child, int32 `[B]`, -1 if there is none; and the next token, int32
        `[B]`: the accepted child's token, or one drawn from the residual of the target.

    Raises:
        ValueError: Shapes do not fit.
    """
    requests = len(target_rows)
    if (
        target.dim() != 2
        or draft.dim() != 2
        or draft.shape[1] != target.shape[1]
        or draft_rows.shape != (requests,)
        or children.shape[:1] != (requests,)
        or coins.shape != (requests, children.shape[1] + 1)
    ):
        shapes = [[*t.shape] for t in (target, draft, target_rows, draft_rows, children, coins)]
        raise ValueError(f"expected [R, V], [S, V], [B], [B], [B, K] and [B, K + 1], not {shapes}")
    run = _REJECT_STEP.on(target)
    return run(target, draft, target_rows, draft_rows, children, coins)
