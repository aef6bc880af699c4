"""Splitting the KV of a request into shares, one program each, as in Flash-Decoding: the number of
shares, and the kernel that merges their results.
"""

from __future__ import annotations

from torch import Tensor

from tree_kernels._triton import jit, next_power_of_2, tl

_PROGRAMS = 256  # about two per multiprocessor of a large GPU
_MIN_TOKENS, _MAX_SHARES = 256, 32


def shares_of(programs: int, reach: int) -> int:
    """The number of shares into which to split the KV, a power of two.

    Args:
        programs: Number of programs per share.
        reach: Maximum number of tokens of a request in the block table. The actual lengths are on
            the device, and reading them would synchronise with it.
    """
    shares = min(_PROGRAMS // programs, reach // _MIN_TOKENS, _MAX_SHARES)
    return 1 << (max(shares, 1).bit_length() - 1)


@jit(do_not_specialize=("requests", "tokens", "shares"))
def _merge_kernel(
    parts: tl.tensor,
    log_sums: tl.tensor,
    query_starts: tl.tensor,
    out: tl.tensor,
    requests: tl.tensor,
    tokens: tl.tensor,
    shares: tl.tensor,
    heads: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    MAX_SHARES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
) -> None:
    """Merge the shares; one program per row and query head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if row >= tl.load(query_starts + requests):
        return
    dims = tl.arange(0, HEAD_PAD)
    valid = dims < HEAD_SIZE
    each = tl.arange(0, MAX_SHARES)
    cells = (each * tokens + row) * heads + head
    log_sum = tl.load(log_sums + cells, mask=each < shares, other=float("-inf"))
    highest = tl.max(log_sum, 0)
    weights = tl.exp2(log_sum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    part = tl.load(
        parts + (cells * HEAD_SIZE)[:, None] + dims[None, :],
        mask=(each < shares)[:, None] & valid[None, :],
        other=0.0,
    )
    attended = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    place = out + row * out_stride + head * out_head_stride
    tl.store(place + dims, attended.to(out.dtype.element_ty), mask=valid)


def merge_shares(parts: Tensor, log_sums: Tensor, query_starts: Tensor, out: Tensor) -> None:
    """Merge each row's S shares, weighted by the sums of their exponentials.

    Args:
        parts: Float32 `[S, T, H, D]`, contiguous: the attention of each share alone.
        log_sums: Float32 `[S, T, H]`, contiguous: log2 of the sum of a share's exponentials; -inf
            for a share without a token that the row attends to.
        query_starts: Int32 `[B + 1]`, the first row of each request. Rows from the last entry on
            are left unchanged.
        out: `[T, H, D]`, the result.
    """
    shares, tokens, heads, head_size = parts.shape
    _merge_kernel[(tokens, heads)](
        *(parts, log_sums, query_starts, out, len(query_starts) - 1, tokens, shares, heads),
        *out.stride()[:2],
        MAX_SHARES=_MAX_SHARES,
        HEAD_SIZE=head_size,
        HEAD_PAD=next_power_of_2(head_size),
    )
