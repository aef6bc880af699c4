"""Attention whose KV is read in shares, by programs of their own: how many shares, and the merging
of what each attended to."""

from __future__ import annotations

from torch import Tensor

from tree_kernels._triton import jit, next_power_of_2, tl

_PROGRAMS = 256  # about two for each multiprocessor of a large GPU
_LEAST_TOKENS, _MOST_SHARES = 256, 32


def shares_of(programs: int, reach: int) -> int:
    """In how many shares to read the KV, a power of two, where one share takes `programs`.

    reach: the longest KV that the block table can hold, in tokens. The lengths themselves are on
    the device, and asking for them would wait for it.
    """
    shares = min(_PROGRAMS // programs, reach // _LEAST_TOKENS, _MOST_SHARES)
    return 1 << (max(shares, 1).bit_length() - 1)


@jit
def _merge_kernel(
    parts: tl.tensor,
    log_sums: tl.tensor,
    query_starts: tl.tensor,
    out: tl.tensor,
    requests: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    SHARES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
) -> None:
    """One program a row and query head, which alone writes it."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if row >= tl.load(query_starts + requests):
        return
    dims = tl.arange(0, HEAD_PAD)
    valid = dims < HEAD_SIZE
    cells = (tl.arange(0, SHARES) * tokens + row) * heads + head
    log_sum = tl.load(log_sums + cells)
    highest = tl.max(log_sum, 0)
    weights = tl.exp2(log_sum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    part = tl.load(
        parts + (cells * HEAD_SIZE)[:, None] + dims[None, :], mask=valid[None, :], other=0.0
    )
    attended = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    to = out + row * out_stride + head * out_head_stride
    tl.store(to + dims, attended.to(out.dtype.element_ty), mask=valid)


def merge_shares(parts: Tensor, log_sums: Tensor, query_starts: Tensor, out: Tensor) -> None:
    """Write to `out` each row's parts, weighted by the sums of their exponentials.

    Args:
        parts: float32 `[S, T, H, D]`, contiguous.
        log_sums: float32 `[S, T, H]`, contiguous, logarithms to base 2; -inf where a part has
            seen nothing.
        query_starts: int32 `[B + 1]`; rows from the last on are left as they are.
        out: `[T, H, D]`.
    """
    shares, tokens, heads, head_size = parts.shape
    _merge_kernel[(tokens, heads)](
        *(parts, log_sums, query_starts, out, len(query_starts) - 1, tokens, heads),
        *out.stride()[:2],
        SHARES=shares,
        HEAD_SIZE=head_size,
        HEAD_PAD=next_power_of_2(head_size),
    )
