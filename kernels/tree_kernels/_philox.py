"""Random numbers that depend on a key and a counter alone: Philox 4x32-10 (Salmon et al., SC 2011).

They do not depend on the order in which programs run, nor on what else a batch holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._triton import jit, tl

# 31 bits, shifted by half a step so that no number is 0. Powers of two scale exactly, so that all
# compilers and devices agree. 31 bits of ones round to 1, so there is a greatest number below it.
SCALE = 2.0**-31
HALF = 2.0**-32
GREATEST = 1 - 2.0**-24
# For u below this, the first terms of the Taylor series of -log(1 - u) are more accurate than its
# direct evaluation. The largest Gumbel noise comes from a u close to 0.
SMALL = 1 / 64
_MASK = 0xFFFFFFFF


@jit
def philox(
    key: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four uint32 for each counter `first`; the key is an int64.

    The counter's upper words `second` and `third` are numbers or blocks of `first`'s shape.
    """
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = first.to(tl.uint32)
    b = tl.zeros_like(a) + second
    c = tl.zeros_like(a) + third
    d = tl.zeros_like(a)
    for _ in tl.static_range(10):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ low
        b = right.to(tl.uint32)
        c = (left >> 32).to(tl.uint32) ^ d ^ high
        d = left.to(tl.uint32)
        low += 0x9E3779B9
        high += 0xBB67AE85
    return a, b, c, d


@jit
def uniform(
    bits: tl.tensor, SCALE: tl.constexpr, HALF: tl.constexpr, GREATEST: tl.constexpr
) -> tl.tensor:
    """Uniform numbers in (0, 1) from uint32."""
    return tl.minimum((bits >> 1).to(tl.int32).to(tl.float32) * SCALE + HALF, GREATEST)


@jit
def gumbel(
    bits: tl.tensor,
    SCALE: tl.constexpr,
    HALF: tl.constexpr,
    GREATEST: tl.constexpr,
    SMALL: tl.constexpr,
) -> tl.tensor:
    """Gumbel noise from uint32 bits: -log of an exponential variable."""
    u = uniform(bits, SCALE, HALF, GREATEST)
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u / 4)))
    return -tl.log(tl.where(u < SMALL, series, -tl.log(1.0 - u)))


def numbers(keys: Tensor, first: Tensor, second: Tensor | int, third: Tensor | int) -> Tensor:
    """Four uniform numbers in (0, 1) for each key and counter, in PyTorch.

    Args:
        keys: Int64 `[R, 1]`.
        first: Lowest word of the counters, int64 `[C]`.
        second: Next word, below 2^32; a number or int64 `[R, 1]`.
        third: Next word, likewise.

    Returns:
        Float32 `[R, 4, C]`.
    """
    low, high = keys & _MASK, (keys >> 32) & _MASK
    a = first.expand(len(keys), -1)
    d = torch.zeros_like(a)
    b, c = d + second, d + third
    for _ in range(10):
        # Products below 2^64 overflow int64 but keep all their bits.
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = ((right >> 32) & _MASK) ^ b ^ low, right & _MASK
        c, d = ((left >> 32) & _MASK) ^ d ^ high, left & _MASK
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return ((torch.stack([a, b, c, d], 1) >> 1).float() * SCALE + HALF).clamp(max=GREATEST)
