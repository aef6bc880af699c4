"""Sampling of one token from the softmax of each row of logits.

The argmax of logit / temperature + Gumbel noise is distributed as the softmax (the Gumbel-max
trick), so a row is read once and no distribution is written. The noise comes from Philox 4x32-10
(Salmon et al., SC 2011) with a key for each row and the id as counter: it does not depend on the
order in which programs run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._philox import GREATEST, HALF, SCALE, SMALL, gumbel, numbers, philox
from tree_kernels._triton import jit, tl
from tree_kernels._vocab_shares import MOST_SHARES, vocab_shares

# A quarter of the logits that a program reads at once, as each counter gives four numbers.
_LANES = 1024


@jit
def _better(
    best: tl.tensor,
    found: tl.tensor,
    line: tl.tensor,
    ids: tl.tensor,
    noise: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Update the best score and id of each lane with the scores of `ids`."""
    logits = tl.load(line + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    scores = logits / temperature + noise
    better = scores > best
    return tl.where(better, scores, best), tl.where(better, ids, found)


@jit
def _draw_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seed: tl.tensor,
    scores: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    logits_stride: tl.tensor,
    span: tl.tensor,
    LANES: tl.constexpr,
    SCALE: tl.constexpr,
    HALF: tl.constexpr,
    GREATEST: tl.constexpr,
    SMALL: tl.constexpr,
) -> None:
    """Find the best token; one program per row and share of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    line = logits + row * logits_stride
    temperature = tl.load(temperatures + row)
    noisy = tl.where(temperature == 0.0, 0.0, 1.0)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    key = tl.load(seed) + row
    lanes = tl.arange(0, LANES)
    best = tl.full([LANES], -float("inf"), tl.float32)
    found = tl.zeros([LANES], tl.int32)
    first = share * span
    for start in range(first, tl.minimum(first + span, vocab), 4 * LANES):
        ids = start + lanes
        one, two, three, four = philox(key, ids, 0, 0)
        noise = noisy * gumbel(one, SCALE, HALF, GREATEST, SMALL)
        best, found = _better(best, found, line, ids, noise, vocab, temperature)
        noise = noisy * gumbel(two, SCALE, HALF, GREATEST, SMALL)
        best, found = _better(best, found, line, ids + LANES, noise, vocab, temperature)
        noise = noisy * gumbel(three, SCALE, HALF, GREATEST, SMALL)
        best, found = _better(best, found, line, ids + 2 * LANES, noise, vocab, temperature)
        noise = noisy * gumbel(four, SCALE, HALF, GREATEST, SMALL)
        best, found = _better(best, found, line, ids + 3 * LANES, noise, vocab, temperature)
    top = tl.max(best, 0)
    place = row * tl.num_programs(1) + share
    tl.store(scores + place, top)
    tl.store(tokens + place, tl.min(tl.where(best == top, found, 0x7FFFFFFF), 0))


@jit(do_not_specialize=["shares"])
def _first_kernel(
    scores: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    shares: tl.tensor,
    MOST_SHARES: tl.constexpr,
) -> None:
    """Take the token of the best share; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, MOST_SHARES)
    there = share < shares
    score = tl.load(scores + row * shares + share, mask=there, other=-float("inf"))
    token = tl.load(tokens + row * shares + share, mask=there, other=0x7FFFFFFF)
    best = there & (score == tl.max(score, 0))
    tl.store(out + row, tl.min(tl.where(best, token, 0x7FFFFFFF), 0))


def _draw_triton(logits: Tensor, temperatures: Tensor, seed: Tensor) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    span, shares = vocab_shares(rows, vocab, 4 * _LANES)
    scores = torch.empty(rows, shares, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, shares, dtype=torch.int32, device=logits.device)
    _draw_kernel[(rows, shares)](
        *(logits, temperatures.contiguous(), seed, scores, tokens),
        *(vocab, logits.stride(0), span),
        LANES=_LANES,
        SCALE=SCALE,
        HALF=HALF,
        GREATEST=GREATEST,
        SMALL=SMALL,
    )
    _first_kernel[(rows,)](scores, tokens, out, shares, MOST_SHARES=MOST_SHARES)
    return out


def _draw_reference(logits: Tensor, temperatures: Tensor, seed: Tensor) -> Tensor:
    rows, vocab = logits.shape
    device = logits.device
    keys = seed + torch.arange(rows, device=device)
    starts = torch.arange(0, vocab, 4 * _LANES, device=device)
    lanes = min(_LANES, vocab)  # fewer suffice for a small vocabulary
    counters = (starts[:, None] + torch.arange(lanes, device=device)).flatten()
    # [R, 4, tiles, lanes]: the four numbers of a counter belong to ids that are _LANES apart.
    of_counters = numbers(keys[:, None], counters, 0, 0).view(rows, 4, -1, lanes)
    u = of_counters.transpose(1, 2).flatten(1)[:, :vocab]
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4)))
    noise = -torch.where(u < SMALL, series, -(1 - u).log()).log()
    greedy = (temperatures == 0)[:, None]
    scores = logits.float() / temperatures[:, None].masked_fill(greedy, 1.0)
    return (scores + noise.masked_fill(greedy, 0.0)).argmax(1).int()


_DRAW = Op("draw.draw_tokens", _draw_reference, triton=_draw_triton)


def draw_tokens(logits: Tensor, temperatures: Tensor, seed: Tensor) -> Tensor:
    """Sample one token from softmax(logits / temperature) of each row.

    Args:
        logits: Float32, bfloat16 or float16 `[R, V]`, without NaN.
        temperatures: Float32 `[R]`. At 0 the most likely token is taken, ties by lowest id.
        seed: Int64 `[1]` on the device of the logits, not negative. Equal seeds give equal tokens.

    Returns:
        The sampled tokens, int32 `[R]`.

    Raises:
        ValueError: Shapes do not fit.
    """
    rows = logits.shape[0]
    if logits.dim() != 2 or temperatures.shape != (rows,) or seed.shape != (1,):
        raise ValueError(
            f"logits {[*logits.shape]}, temperatures {[*temperatures.shape]} and seed "
            f"{[*seed.shape]} must be [R, V], [R] and [1]"
        )
    return _DRAW.on(logits)(logits, temperatures, seed)
