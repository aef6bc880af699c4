"""Recursive rejection sampling of one level (RSD, arXiv 2402.14160, section 3.1, algorithm 3).

A node's children were drawn without replacement from the draft distribution p. They are tried in
the order in which they were drawn. Child x is accepted with probability min(1, q(x) / p(x)); if it
is rejected, the next child is tried with

    q <- norm(max(q - p, 0)),    p <- norm(p without x).

If no child is accepted, the next token is drawn from the last q. The token that follows the node is
then distributed as the target q, for any p.

The reference and C++ sum distributions in double precision, so that they decide alike for the same
coins although they sum in different orders.

On a GPU each request's vocabulary is read in shares, by a program each. Programs cannot wait for
one another, so whatever depends on a sum over the vocabulary needs a launch of its own: K + 1
launches for K children, and 2 without any. In launch k all shares decide about child k, which needs
the masses that were left before it, and sum their shares of what its rejection leaves. The last
launch draws from that. The distributions are given with a mass of 1, so the first child needs no
sums. The shares are the same for any batch, and so is what a request gets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, tl
from tree_kernels._vocab_shares import MOST_SHARES, vocab_shares

_REJECT = CppFunction("rejection.cpp", "reject_step", "ppppppiiippi")
_BLOCK = 4096
# What a launch leaves of a request: the accepted child and the scales of q and p; then the masses
# of q in each share, those of p, and those of the target (or of what its first rejection left).
_SCALARS = 3


@jit
def _residual(q: tl.tensor, p: tl.tensor, q_scale: tl.tensor, p_scale: tl.tensor) -> tl.tensor:
    """What is left of the target: repeated `max(. - ., 0)` is one, as its p only loses tokens.

    A token that p loses was rejected, so nothing of it was left, and nothing comes back.
    """
    return tl.maximum(q * q_scale - p * p_scale, 0.0)


@jit
def _state(
    line: tl.tensor, child: tl.tensor, shares: tl.tensor, SCALARS: tl.constexpr, MOST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What `line`, left by the launch for the child before `child`, says.

    Returns:
        The accepted child, -1 for none yet; whether one may be accepted; the scales of q and p; and
        their masses by share.
    """
    share = tl.arange(0, MOST)
    there = share < shares
    found = tl.load(line).to(tl.int32)
    q_scale = tl.load(line + 1)
    p_scale = tl.load(line + 2)
    q_masses = tl.load(line + SCALARS + share, mask=there, other=0.0)
    p_masses = tl.load(line + SCALARS + shares + share, mask=there, other=0.0)
    targets = tl.load(line + SCALARS + 2 * shares + share, mask=there, other=0.0)
    # After a target without mass, or of NaN, nothing is accepted.
    has_mass = tl.sum(targets, 0) > 0.0
    # If nothing is left of the target, q equals p, so only rounding can have rejected the child.
    nothing_left = (p_scale > 0.0) & (tl.sum(q_masses, 0) <= 0.0)
    found = tl.where((found < 0) & nothing_left & has_mass, child - 1, found)
    return found, (found < 0) & has_mass, q_scale, p_scale, q_masses, p_masses


@jit(do_not_specialize=["coins", "coins_stride", "child", "num_children", "shares"])
def _try_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    target_rows: tl.tensor,
    draft_rows: tl.tensor,
    children: tl.tensor,
    coins: tl.tensor,
    left: tl.tensor,
    coins_stride: tl.tensor,
    vocab: tl.tensor,
    child: tl.tensor,
    num_children: tl.tensor,
    span: tl.tensor,
    shares: tl.tensor,
    BLOCK: tl.constexpr,
    SCALARS: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Try one child of each node; one program per request and share of the vocabulary."""
    request = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    draft_row = tl.load(draft_rows + request)
    q_row = target + tl.load(target_rows + request) * vocab
    p_row = draft + tl.maximum(draft_row, 0) * vocab
    siblings = children + request * num_children
    width = SCALARS + 3 * shares
    out = left + (child * tl.num_programs(0) + request) * width
    found = tl.full([], -1, tl.int32)
    is_open = found < 0
    q_scale = 1.0
    p_scale = 0.0
    q_mass = 1.0
    p_mass = 1.0
    target_sum = 0.0
    if child > 0:
        before = left + ((child - 1) * tl.num_programs(0) + request) * width
        found, is_open, q_scale, p_scale, q_masses, p_masses = _state(
            before, child, shares, SCALARS, MOST
        )
        q_mass = tl.sum(q_masses, 0)
        p_mass = tl.sum(p_masses, 0)
        target_sum = tl.load(before + SCALARS + 2 * shares + share)
    token = tl.load(siblings + child, mask=child < num_children, other=-1)
    tries = is_open & (token >= 0) & (draft_row >= 0)
    if tries:
        p_token = tl.load(p_row + token)
        left_of_token = _residual(tl.load(q_row + token), p_token, q_scale, p_scale)
        p_inverse = tl.where(p_mass > 0.0, 1.0 / tl.where(p_mass > 0.0, p_mass, 1.0), 0.0)
        coin = tl.load(coins + request * coins_stride + child)
        found = tl.where(coin * p_token * p_inverse < left_of_token / q_mass, child, found)
        q_scale = q_scale / q_mass
        p_scale = p_scale / q_mass + p_inverse
    rejects = tries & (found < 0)
    if share == 0:
        tl.store(out, found.to(tl.float32))
        tl.store(out + 1, q_scale)
        tl.store(out + 2, p_scale)
    q_sum = 0.0
    p_sum = 0.0
    if rejects | ((found < 0) & (child == 0)):
        first = share * span
        last = tl.minimum(first + span, vocab)
        p_last = tl.where(rejects, last, 0)
        for start in range(first, last, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            q = tl.load(q_row + columns, mask=columns < last, other=0.0)
            p = tl.load(p_row + columns, mask=columns < p_last, other=0.0)
            q_sum += tl.sum(_residual(q, p, q_scale, p_scale), 0)
            for tried in range(0, tl.minimum(child + 1, num_children)):
                p = tl.where(columns == tl.load(siblings + tried), 0.0, p)
            p_sum += tl.sum(p, 0)
        if child == 0:
            target_sum = q_sum
            # What is left tells that there was mass; where nothing is, read the target again.
            if rejects & (q_sum <= 0.0):
                for start in range(first, last, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    q = tl.load(q_row + columns, mask=columns < last, other=0.0)
                    target_sum += tl.sum(q, 0)
    elif found < 0:
        # No child is left to try.
        before = left + ((child - 1) * tl.num_programs(0) + request) * width + SCALARS
        q_sum = tl.load(before + share)
        p_sum = tl.load(before + shares + share)
    tl.store(out + SCALARS + share, q_sum)
    tl.store(out + SCALARS + shares + share, p_sum)
    tl.store(out + SCALARS + 2 * shares + share, target_sum)


@jit(do_not_specialize=["coins", "coins_stride", "num_children", "shares"])
def _take_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    target_rows: tl.tensor,
    draft_rows: tl.tensor,
    children: tl.tensor,
    coins: tl.tensor,
    left: tl.tensor,
    accepted: tl.tensor,
    tokens: tl.tensor,
    coins_stride: tl.tensor,
    vocab: tl.tensor,
    num_children: tl.tensor,
    span: tl.tensor,
    shares: tl.tensor,
    BLOCK: tl.constexpr,
    SCALARS: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Take the accepted child or draw a token; one program per request and share, one writes."""
    request = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    tried = tl.maximum(num_children, 1)
    line = left + ((tried - 1) * tl.num_programs(0) + request) * (SCALARS + 3 * shares)
    found, _, q_scale, p_scale, q_masses, _ = _state(line, tried, shares, SCALARS, MOST)
    every = tl.arange(0, MOST)
    ends = tl.cumsum(q_masses, 0)
    coin = tl.load(coins + request * coins_stride + num_children)
    wanted = coin * tl.sum(q_masses, 0)
    # Due to rounding, the running sums may stay below the mass.
    reached = tl.min(tl.where((ends > wanted) & (q_masses > 0.0), every, MOST), 0)
    drawn_from = tl.minimum(reached, tl.max(tl.where(q_masses > 0.0, every, 0), 0))
    if found >= 0:
        if share == 0:
            tl.store(accepted + request, found)
            tl.store(tokens + request, tl.load(children + request * num_children + found))
    elif share == drawn_from:
        draft_row = tl.load(draft_rows + request)
        q_row = target + tl.load(target_rows + request) * vocab
        p_row = draft + tl.maximum(draft_row, 0) * vocab
        first = share * span
        last = tl.minimum(first + span, vocab)
        p_last = tl.where((draft_row >= 0) & (p_scale > 0.0), last, 0)
        before = tl.sum(tl.where(every == share - 1, ends, 0.0), 0)
        drawn = -1
        # Without mass, the first token.
        greatest = 0
        for start in range(first, last, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            q = tl.load(q_row + columns, mask=columns < last, other=0.0)
            p = tl.load(p_row + columns, mask=columns < p_last, other=0.0)
            mass = _residual(q, p, q_scale, p_scale)
            hits = (before + tl.cumsum(mass, 0) > wanted) & (mass > 0.0)
            hit = tl.min(tl.where(hits, columns, vocab), 0)
            drawn = tl.where((drawn < 0) & (hit < vocab), hit, drawn)
            greatest = tl.maximum(greatest, tl.max(tl.where(mass > 0.0, columns, 0), 0))
            before += tl.sum(mass, 0)
        tl.store(accepted + request, found)
        tl.store(tokens + request, tl.where(drawn < 0, greatest, drawn))


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
        span, shares = vocab_shares(1, vocab, _BLOCK)
        launches = max(num_children, 1)
        left = torch.empty(launches, requests, _SCALARS + 3 * shares, device=target.device)
        coins = coins if coins.stride(1) == 1 else coins.contiguous()
        given = (
            *(target.contiguous(), draft.contiguous(), target_rows, draft_rows),
            *(children.contiguous(), coins, left),
        )
        sizes = coins.stride(0), vocab
        constants = {"BLOCK": _BLOCK, "SCALARS": _SCALARS, "MOST": MOST_SHARES, "num_warps": 8}
        for child in range(launches):
            _try_kernel[(requests, shares)](
                *(*given, *sizes, child, num_children, span, shares), **constants
            )
        _take_kernel[(requests, shares)](
            *(*given, accepted, tokens, *sizes, num_children, span, shares), **constants
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
    # After a target without mass, or of NaN, nothing is accepted.
    may_accept = (draft_rows >= 0) & (_mass(q)[:, 0] > 0)
    for child in range(num_children):
        token = children[:, child].long()
        tried = (accepted < 0) & (token >= 0) & may_accept
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
    # The last token with mass: due to rounding, the running sums may stay below the mass. Without
    # mass, the first token.
    last = torch.where(q > 0, torch.arange(q.shape[1], device=q.device), 0).amax(1)
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
        target: Float32 `[R, V]`, distributions of the target after all filters; each row sums to 1,
            or is zeros or NaN where no token is allowed.
        draft: Float32 `[S, V]`, the distributions that the children were drawn from, after the same
            filters; each row sums to 1, or is zeros where the children were not drawn.
        target_rows: Int64 `[B]`, the row of `target` of each request's node.
        draft_rows: Int64 `[B]`, the row of `draft` of each request's node; -1 for a node without
            children.
        children: Int32 `[B, K]`, the tokens of the children in the order in which they were drawn,
            padded with -1 at the end.
        coins: Float32 `[B, K + 1]`, uniform in [0, 1): one for each child, and one for the draw if
            no child is accepted.

    Returns:
        The index of the accepted child, int32 `[B]`, -1 if there is none; and the next token, int32
        `[B]`: the accepted child's token, or one drawn from the residual of the target; 0 where no
        token is allowed.

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
