"""The adjacency matrix of Token Recycling (arXiv 2408.08696, section 3.2).

Row t has the k most likely tokens after token t, most likely first, by the target's most recent
logits after t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._running_top import keep_largest, no_keys
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels._vocab_shares import MOST_SHARES, vocab_shares

_TOP = {
    dtype: CppFunction("adjacency.cpp", f"top_{name}", "piiiippi")
    for dtype, name in (
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
    )
}
_UPDATE = CppFunction("adjacency.cpp", "update", "piippii")
_LANES = 64
_BLOCK = 1024
# Logits that a Triton program reads at once, and tokens that it compares at once.
_TILE = 4096
_ROWS = 256


@jit
def _writes_row(
    tokens: tl.tensor,
    token: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    matrix_rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Whether `token` names a matrix row and no later row of the step has the same token."""
    later = tl.full([], 0, tl.int32)
    for start in range(row + 1, num_rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < num_rows
        others = tl.load(tokens + offsets, mask=inside, other=-1)
        later += tl.sum(((others == token) & inside).to(tl.int32), 0)
    return (later == 0) & (token >= 0) & (token < matrix_rows)


@jit
def _top_kernel(
    logits: tl.tensor,
    keys: tl.tensor,
    vocab: tl.tensor,
    logits_stride: tl.tensor,
    span: tl.tensor,
    K_PAD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Find the largest keys (see `_running_top`); one program per row and share of the
    vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    slots = tl.arange(0, K_PAD)
    best = no_keys(slots)
    line = logits + row * logits_stride
    first = share * span
    for start in range(first, tl.minimum(first + span, vocab), TILE):
        ids = start + tl.arange(0, TILE)
        values = tl.load(line + ids, mask=ids < vocab, other=0.0).to(tl.float32)
        best = keep_largest(best, values, ids, vocab)
    tl.store(keys + (row * tl.num_programs(1) + share) * K_PAD + slots, best)


@jit(do_not_specialize=["shares", "num_rows"])
def _keep_kernel(
    matrix: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    candidates: tl.tensor,
    shares: tl.tensor,
    num_rows: tl.tensor,
    matrix_rows: tl.tensor,
    matrix_stride: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    MOST_SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    WRITE: tl.constexpr,
) -> None:
    """Find the k largest keys of all shares; one program per row. WRITE updates the matrix."""
    row = tl.program_id(0)
    slot = tl.arange(0, MOST_SHARES * K_PAD)
    there = slot < shares * K_PAD
    line = keys + row.to(tl.int64) * shares * K_PAD
    key = tl.load(line + slot, mask=there, other=-0x7FFFFFFFFFFFFFFF)
    place = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    found = 0x7FFFFFFF - key.to(tl.int32)
    kept = there & (place < K)
    tl.store(candidates + row.to(tl.int64) * K + place, found, mask=kept)
    if WRITE:
        token = tl.load(tokens + row).to(tl.int64)
        writes = _writes_row(tokens, token, row, num_rows, matrix_rows, ROWS)
        # The interpreter cannot combine a scalar condition with one of a block.
        kept = there & (place < tl.where(writes, K, 0))
        tl.store(matrix + token * matrix_stride + place, found, mask=kept)


def _top_triton(logits: Tensor, k: int) -> Tensor:
    return _keep_triton(None, None, logits, k)


def _recycle_triton(matrix: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
    return _keep_triton(matrix, tokens, logits, matrix.shape[1])


def _keep_triton(matrix: Tensor | None, tokens: Tensor | None, logits: Tensor, k: int) -> Tensor:
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    candidates = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return candidates
    span, shares = vocab_shares(rows, vocab, _TILE)
    k_pad = next_power_of_2(k)
    keys = torch.empty(rows, shares, k_pad, dtype=torch.int64, device=logits.device)
    _top_kernel[(rows, shares)](
        *(logits, keys, vocab, logits.stride(0), span),
        K_PAD=k_pad,
        TILE=_TILE,
        num_warps=8,
    )
    write = matrix is not None
    _keep_kernel[(rows,)](
        matrix if matrix is not None else candidates,
        tokens.contiguous() if tokens is not None else candidates,
        *(keys, candidates, shares, rows),
        *((matrix.shape[0], matrix.stride(0)) if matrix is not None else (0, 0)),
        K=k,
        K_PAD=k_pad,
        MOST_SHARES=MOST_SHARES,
        ROWS=_ROWS,
        WRITE=write,
    )
    return candidates


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Int64 keys that order larger values first, equal values by lowest id; NaN is the largest."""
    values = values.float() + 0.0
    bits = values.view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(values.isnan(), 0x7FFFFFFF)
    return (order.long() << 32) | (0x7FFFFFFF - ids)


def top_reference(logits: Tensor, k: int) -> Tensor:
    """`top_candidates` in PyTorch.

    The k blocks of 1024 ids with the largest maxima contain the k largest logits, and so do the k
    runs of 64 ids with the largest maxima in them. Only these 64 k logits are sorted.
    """
    rows, vocab = logits.shape
    full = vocab // _BLOCK
    device = logits.device
    body = logits[:, : full * _BLOCK].view(rows, full, _BLOCK)
    # Two reductions across lanes are several times as fast as one over neighbours in bfloat16.
    tops = body.view(rows, full, _BLOCK // _LANES, _LANES).amax(2).amax(2)
    tail = logits[:, full * _BLOCK :]
    if tail.shape[1]:
        tops = torch.cat((tops, tail.amax(1, keepdim=True)), 1)
        # The padding has higher ids than the vocabulary, so even logits of -inf rank before it.
        tail = torch.nn.functional.pad(tail, (0, _BLOCK - tail.shape[1]), value=-torch.inf)
    blocks = (
        _keys(tops, torch.arange(tops.shape[1], device=device))
        .topk(min(k, tops.shape[1]), 1)
        .indices
    )
    lines = torch.arange(rows, device=device)[:, None]
    if full == 0:
        chosen = tail[:, None]
    else:
        chosen = body[lines, blocks.clamp(max=full - 1)]
        if tail.shape[1]:
            chosen = torch.where((blocks == full)[:, :, None], tail[:, None], chosen)
    runs = chosen.reshape(rows, chosen.shape[1] * _BLOCK // _LANES, _LANES)
    offsets = torch.arange(0, _BLOCK, _LANES, device=device)
    starts = (blocks[:, :, None] * _BLOCK + offsets).flatten(1)
    best = _keys(runs.amax(2), starts).topk(min(k, runs.shape[1]), 1).indices
    values = runs[lines, best].flatten(1)
    lanes = torch.arange(_LANES, device=device)
    ids = (starts.gather(1, best)[:, :, None] + lanes).flatten(1)
    return ids.gather(1, _keys(values, ids).topk(k, 1).indices).int()


def write_rows(matrix: Tensor, tokens: Tensor, candidates: Tensor) -> None:
    """Write `matrix[tokens[r]] = candidates[r]`; the last row of a repeated token wins.

    In the paper the writers race; here the order is fixed. Tokens outside the matrix are skipped.
    On a GPU the selection synchronises with the device, so only references use this function.

    Args:
        matrix: Int32 `[V, k]`, written in place.
        tokens: Int32 or int64 `[R]`, the matrix rows to write.
        candidates: Int32 `[R, k]`, the values to write.
    """
    ordered, rows = tokens.sort(stable=True)
    winner = rows[torch.searchsorted(ordered, tokens.contiguous(), right=True) - 1]
    # Rows with the same token write the same candidates, so the order of writes does not matter.
    valid = (tokens >= 0) & (tokens < matrix.shape[0])
    matrix[tokens[valid].long()] = candidates[winner[valid]]


def _recycle_reference(matrix: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
    candidates = top_reference(logits, matrix.shape[1])
    write_rows(matrix, tokens, candidates)
    return candidates


def _top_cpp(logits: Tensor, k: int) -> Tensor:
    top = _TOP.get(logits.dtype)
    if top is None:
        return top_reference(logits, k)
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    candidates = torch.empty(rows, k, dtype=torch.int32)
    orders = torch.empty_like(candidates)
    top.call(
        logits.data_ptr(),
        *(rows, logits.stride(0), vocab, k),
        *(candidates.data_ptr(), orders.data_ptr()),
        torch.get_num_threads(),
    )
    return candidates


def _update_cpp(matrix: Tensor, tokens: Tensor, candidates: Tensor) -> None:
    tokens, candidates = tokens.int().contiguous(), candidates.contiguous()
    _UPDATE.call(
        *(matrix.data_ptr(), matrix.shape[0], matrix.stride(0)),
        *(tokens.data_ptr(), candidates.data_ptr(), *candidates.shape),
    )


def _recycle_cpp(matrix: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
    candidates = _top_cpp(logits, matrix.shape[1])
    _update_cpp(matrix, tokens, candidates)
    return candidates


_TOP_CANDIDATES = Op(
    "adjacency.top_candidates", top_reference, triton=_top_triton, cpp=_top_cpp, needs=_UPDATE
)
_RECYCLE = Op(
    "adjacency.recycle",
    _recycle_reference,
    triton=_recycle_triton,
    cpp=_recycle_cpp,
    needs=_UPDATE,
)


def _check_k(logits: Tensor, k: int) -> None:
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k = {k} is not between 1 and the vocabulary's size, {logits.shape[1]}")


def _check_matrix(matrix: Tensor, k: int, tokens: Tensor, rows: int) -> None:
    if matrix.shape[1] != k or matrix.stride(1) != 1:
        raise ValueError(f"matrix must be [V, {k}] with adjacent columns, not {[*matrix.shape]}")
    if tokens.shape != (rows,):
        raise ValueError(f"tokens must be [{rows}], not {[*tokens.shape]}")


def top_candidates(logits: Tensor, k: int) -> Tensor:
    """The ids of the k largest logits of each row, largest first; ties by lowest id.

    Args:
        logits: Float32, bfloat16 or float16 `[R, V]`. NaN counts as the largest.
        k: Number of candidates of a row.

    Returns:
        Int32 `[R, k]`; column 0 is the argmax.

    Raises:
        ValueError: k is not between 1 and V.
    """
    _check_k(logits, k)
    return _TOP_CANDIDATES.on(logits)(logits, k)


def recycle(matrix: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
    """Write the top candidates of a step's logits into the adjacency matrix (section 3.2).

    The last row of a repeated token wins; tokens outside the matrix are skipped.

    Args:
        matrix: Int32 `[V, k]`, written in place.
        tokens: Int32 or int64 `[R]`, the tokens that the target read.
        logits: Float32, bfloat16 or float16 `[R, V']`, the target's logits after each token.

    Returns:
        The candidates, int32 `[R, k]`, as `top_candidates` returns them.

    Raises:
        ValueError: Shapes do not fit, or k is not between 1 and V'.
    """
    k = matrix.shape[1]
    _check_k(logits, k)
    _check_matrix(matrix, k, tokens, logits.shape[0])
    return _RECYCLE.on(logits)(matrix, tokens, logits)
