"""What the kernel of `tree_attention` computes beside attention itself."""

from __future__ import annotations

from tree_kernels._triton import jit, tl


@jit
def request_of(
    query_starts: tl.tensor, requests: tl.tensor, block: tl.tensor, BLOCK_ROWS: tl.constexpr
) -> tl.tensor:
    """The last request whose blocks of rows begin at or before `block`, by bisection."""
    low = block * 0
    high = low + requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_starts + middle) // BLOCK_ROWS + middle
        low = tl.where(begins <= block, middle, low)
        high = tl.where(begins <= block, high, middle)
    return low


@jit
def ones(word: tl.tensor) -> tl.tensor:
    """The number of bits that are set in each word."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@jit
def tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent; near 0, where 1 - e would cancel, a polynomial."""
    size = tl.abs(x)
    e = tl.exp2(size * -2.885390082)
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x + x * x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * -0.05396825397))
    return tl.where(size < 0.25, near, tl.where(x < 0, -far, far))
