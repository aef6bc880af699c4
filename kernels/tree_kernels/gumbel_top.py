"""The tokens with the largest log p plus Gumbel noise: samples without replacement (Gumbel-top-k).

The k largest of `log p + noise` are k tokens drawn from p one after another without replacement, in
the order in which they are drawn (Kool et al., arXiv 1903.06059, section 2.3). The noise comes from
Philox numbers (see `noise`), which belong to a token's place among all of a request's, so it is
never written: each row is read once, in shares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._philox import GREATEST, HALF, SCALE, SMALL, gumbel, philox
from tree_kernels._running_top import keep_largest, no_keys
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels._vocab_shares import MOST_SHARES, vocab_shares
from tree_kernels.noise import uniform_numbers

# A quarter of the tokens that a program reads at once, as each counter gives four numbers.
_LANES = 512

MOST = 64
"""The greatest K of the kernel; beyond it, sorting is faster."""

BYTES_BEYOND = 20
"""Bytes of memory that a larger K takes at most for each probability, beside it: for the logarithm,
the noise of all requests and of those that draw, the sum, and what the search takes."""


class Perturbed(NamedTuple):
    """The best tokens after each node.

    Attributes:
        values: `float32 [B, W, K]`, log p plus noise, the largest first; -inf where p is 0.
        tokens: `int64 [B, W, K]`; arbitrary where p is 0.
        log_probs: `float32 [B, W, K]`, log p of each.
    """

    values: Tensor
    tokens: Tensor
    log_probs: Tensor


@jit
def _log(p: tl.tensor) -> tl.tensor:
    """The logarithm of probabilities, of which 0 gives -inf."""
    return tl.where(p > 0.0, tl.log(tl.where(p > 0.0, p, 1.0)), -float("inf"))


@jit
def _keep_tokens(
    best: tl.tensor,
    line: tl.tensor,
    ids: tl.tensor,
    bits: tl.tensor,
    drawn: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    vocab: tl.tensor,
    SCALE: tl.constexpr,
    HALF: tl.constexpr,
    GREATEST: tl.constexpr,
    SMALL: tl.constexpr,
) -> tl.tensor:
    """Update the largest keys with those tokens of a row that are in a share of it."""
    inside = (ids >= first) & (ids < last)
    noise = tl.where(drawn, gumbel(bits, SCALE, HALF, GREATEST, SMALL), 0.0)
    value = _log(tl.load(line + ids, mask=inside, other=0.0)) + noise
    return keep_largest(best, value, tl.where(inside, ids, vocab), vocab)


@jit(do_not_specialize=["stream"])
def _shares_kernel(
    probs: tl.tensor,
    seeds: tl.tensor,
    lengths: tl.tensor,
    draws: tl.tensor,
    keys: tl.tensor,
    stream: tl.tensor,
    width: tl.tensor,
    vocab: tl.tensor,
    span: tl.tensor,
    TOP: tl.constexpr,
    LANES: tl.constexpr,
    SCALE: tl.constexpr,
    HALF: tl.constexpr,
    GREATEST: tl.constexpr,
    SMALL: tl.constexpr,
) -> None:
    """Find the largest keys (see `_running_top`); one program per row and share of its tokens."""
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    line = probs + row * vocab
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, vocab)
    # The row's first number among those of its request.
    before = ((row - request * width) * vocab).to(tl.int32)
    seed = tl.load(seeds + request)
    length = tl.load(lengths + request).to(tl.uint32)
    drawn = tl.load(draws + request) != 0
    slots = tl.arange(0, TOP)
    best = no_keys(slots)
    for start in range((before + first) // 4, (before + last + 3) // 4, LANES):
        counters = start + tl.arange(0, LANES)
        one, two, three, four = philox(seed, counters, stream.to(tl.uint32), length)
        ids = 4 * counters - before
        best = _keep_tokens(
            best, line, ids, one, drawn, first, last, vocab, SCALE, HALF, GREATEST, SMALL
        )
        best = _keep_tokens(
            best, line, ids + 1, two, drawn, first, last, vocab, SCALE, HALF, GREATEST, SMALL
        )
        best = _keep_tokens(
            best, line, ids + 2, three, drawn, first, last, vocab, SCALE, HALF, GREATEST, SMALL
        )
        best = _keep_tokens(
            best, line, ids + 3, four, drawn, first, last, vocab, SCALE, HALF, GREATEST, SMALL
        )
    tl.store(keys + (row * tl.num_programs(1) + tl.program_id(1)) * TOP + slots, best)


@jit(do_not_specialize=["shares", "count"])
def _merge_kernel(
    probs: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    log_probs: tl.tensor,
    vocab: tl.tensor,
    shares: tl.tensor,
    count: tl.tensor,
    TOP: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Take the best keys of all shares in order; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, KEYS)
    key = tl.load(
        keys + row * shares * TOP + slots, mask=slots < shares * TOP, other=-0x7FFFFFFFFFFFFFFF
    )
    for rank in range(count):
        top = tl.max(key, 0)
        key = tl.where(key == top, -0x7FFFFFFFFFFFFFFF, key)
        order = (top >> 32).to(tl.int32)
        value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        token = 0x7FFFFFFF - (top & 0xFFFFFFFF)
        log_p = _log(tl.load(probs + row * vocab + token))
        tl.store(values + row * count + rank, value)
        tl.store(tokens + row * count + rank, token)
        tl.store(log_probs + row * count + rank, log_p)


def _triton(
    probs: Tensor, seeds: Tensor, lengths: Tensor, draws: Tensor, stream: int, count: int
) -> Perturbed:
    batch, width, vocab = probs.shape
    if count > MOST:
        return _reference(probs, seeds, lengths, draws, stream, count)
    shape = batch, width, count
    values = torch.empty(shape, device=probs.device)
    tokens = torch.empty(shape, dtype=torch.int64, device=probs.device)
    log_probs = torch.empty_like(values)
    rows = batch * width
    if rows:
        top = next_power_of_2(count)
        span, shares = vocab_shares(rows, vocab, 4 * _LANES)
        keys = torch.empty(rows, shares, top, dtype=torch.int64, device=probs.device)
        _shares_kernel[(rows, shares)](
            *(probs, seeds, lengths, draws, keys, stream, width, vocab, span),
            TOP=top,
            LANES=_LANES,
            SCALE=SCALE,
            HALF=HALF,
            GREATEST=GREATEST,
            SMALL=SMALL,
        )
        _merge_kernel[(rows,)](
            *(probs, keys, values, tokens, log_probs, vocab, shares, count),
            TOP=top,
            KEYS=MOST_SHARES * top,
        )
    return Perturbed(values, tokens, log_probs)


def _reference(
    probs: Tensor, seeds: Tensor, lengths: Tensor, draws: Tensor, stream: int, count: int
) -> Perturbed:
    log_p = torch.where(probs > 0, probs.log(), -torch.inf)  # of NaN too, as in the kernel
    drawn = uniform_numbers(seeds, lengths, stream, log_p[0].numel() if len(log_p) else 0)
    # The largest noise comes from a number close to 0, where the logarithm is exact.
    noise = drawn.neg_().log1p_().neg_().log_().neg_().view_as(log_p)
    return perturbed_top(log_p, torch.where(draws[:, None, None], noise, 0.0), count)


def perturbed_top(log_p: Tensor, noise: Tensor, count: int) -> Perturbed:
    """The tokens with the largest log p plus the given noise.

    Args:
        log_p: `float32 [B, W, V]`, log-probabilities after each node.
        noise: `float32 [B, W, V]`.
        count: K, at most V.
    """
    top = (log_p + noise).topk(count, dim=2)
    return Perturbed(top.values, top.indices, log_p.gather(2, top.indices))


_GUMBEL_TOP = Op("gumbel_top.gumbel_top", _reference, triton=_triton)


def gumbel_top(
    probs: Tensor, seeds: Tensor, lengths: Tensor, draws: Tensor, stream: int, count: int
) -> Perturbed:
    """Draw tokens without replacement after each node, or take the most likely ones.

    Args:
        probs: `float32 [B, W, V]`, probabilities after the W nodes of each request.
        seeds: `int64 [B]`, the seed of each request.
        lengths: Integers `[B]`, not negative.
        draws: `bool [B]`; where it is false there is no noise, and ties go to either token.
        stream: Which of the step's draws this is, not negative.
        count: Number of tokens after each node, K, at least 1 and at most V.

    Raises:
        ValueError: Shapes or types do not fit.
    """
    batch = probs.shape[:1]
    if (
        probs.dim() != 3
        or probs.dtype != torch.float32
        or not seeds.shape == lengths.shape == draws.shape == batch
        or seeds.dtype != torch.int64
        or draws.dtype != torch.bool
        or not 1 <= count <= probs.shape[2]
    ):
        raise ValueError(
            f"probs {probs.dtype} {[*probs.shape]}, seeds {seeds.dtype} {[*seeds.shape]}, lengths "
            f"{[*lengths.shape]} and draws {draws.dtype} {[*draws.shape]} must be float32 "
            f"[B, W, V], int64 [B], [B] and bool [B], and count={count} from 1 to V"
        )
    probs, draws = probs.contiguous(), draws.contiguous()
    run = _GUMBEL_TOP.on(probs)
    return run(probs, seeds.contiguous(), lengths.contiguous(), draws, stream, count)
