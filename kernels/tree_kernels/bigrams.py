"""The bigram table: candidates by a token and the token before it.

A bigram is stored in the cell of its hash and replaces another bigram there. This extends
the adjacency matrix of Token Recycling (arXiv 2408.08696, section 3.2) from one token to two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.adjacency import write_rows
from tree_kernels.ngrams import mixed, ngram_cells

_UPDATE = CppFunction("bigrams.cpp", "update_bigrams", "piippppii")
_NONE = -1
_ROWS = 256  # rows that a Triton program compares at once


def bigram_cells(previous: Tensor, tokens: Tensor, cells: int) -> Tensor:
    """The cells of bigrams in a table of `cells` cells, int64, shaped like `tokens`."""
    return ngram_cells(torch.stack((previous, tokens), -1), cells)


@jit
def bigram_hash(previous: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The uint32 hash of bigrams, whose lowest bits give the cell."""
    return mixed(mixed(tl.full(token.shape, 2, tl.uint32), previous), token)


@jit(do_not_specialize=["slots", "tokens", "previous", "rows"])
def _update_kernel(
    bigrams: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    previous: tl.tensor,
    candidates: tl.tensor,
    rows: tl.tensor,
    cells: tl.tensor,
    table_cells: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Write a row, unless a later row has the same cell; one program per row.

    `table_cells` is the number of cells of a slot's table, or 0 if all slots share one table.
    """
    row = tl.program_id(0)
    own = row + tl.arange(0, 1)
    token = tl.load(tokens + own)
    first = tl.load(previous + own)
    slot = tl.load(slots + own)
    cell = (bigram_hash(first, token).to(tl.int64) & (cells - 1)) + slot * table_cells
    later = tl.full([], 0, tl.int32)
    for start in range(row + 1, rows, ROWS):
        offsets = start + tl.arange(0, ROWS)
        inside = offsets < rows
        others = tl.load(tokens + offsets, mask=inside, other=-1)
        firsts = tl.load(previous + offsets, mask=inside, other=-1)
        theirs = tl.load(slots + offsets, mask=inside, other=0) * table_cells
        theirs += bigram_hash(firsts, others).to(tl.int64) & (cells - 1)
        same = (theirs == cell) & inside & (others >= 0) & (firsts != -1)
        later += tl.sum(same.to(tl.int32), 0)
    # The interpreter cannot combine a scalar condition with one of a block.
    writes = (token >= 0) & (first != -1) & (tl.full([1], 0, tl.int32) + later == 0)
    to = bigrams + cell * (K + 2)
    tl.store(to, first, mask=writes)
    tl.store(to + 1, token, mask=writes)
    lane = tl.arange(0, K_PAD)
    found = tl.load(candidates + row.to(tl.int64) * K + lane, mask=lane < K, other=0)
    tl.store(to + 2 + lane, found, mask=lane < tl.where(writes, K, 0))


def _update_triton(
    bigrams: Tensor, slots: Tensor, tokens: Tensor, previous: Tensor, candidates: Tensor
) -> None:
    rows, k = candidates.shape
    if rows == 0:
        return
    tables, cells, _ = bigrams.shape
    _update_kernel[(rows,)](
        *(bigrams, slots.contiguous(), tokens.contiguous(), previous.contiguous()),
        *(candidates.contiguous(), rows, cells, cells if tables > 1 else 0),
        K=k,
        K_PAD=next_power_of_2(k),
        ROWS=_ROWS,
    )


def _update_reference(
    bigrams: Tensor, slots: Tensor, tokens: Tensor, previous: Tensor, candidates: Tensor
) -> None:
    tables, size, _ = bigrams.shape
    cells = bigram_cells(previous, tokens, size)
    if tables > 1:
        cells += slots * size
    known = (tokens >= 0) & (previous != _NONE)
    rows = torch.cat((previous[:, None], tokens[:, None], candidates), 1)
    write_rows(bigrams.flatten(0, 1), torch.where(known, cells, _NONE).int(), rows)


def _update_cpp(
    bigrams: Tensor, slots: Tensor, tokens: Tensor, previous: Tensor, candidates: Tensor
) -> None:
    slots, tokens, previous, candidates = (
        each.contiguous() for each in (slots.long(), tokens.int(), previous.int(), candidates.int())
    )
    _UPDATE.call(
        *(bigrams.data_ptr(), *bigrams.shape[:2], slots.data_ptr(), tokens.data_ptr()),
        *(previous.data_ptr(), candidates.data_ptr(), *candidates.shape),
    )


_UPDATE_BIGRAMS = Op(
    "bigrams.update_bigrams",
    _update_reference,
    triton=_update_triton,
    cpp=_update_cpp,
    needs=_UPDATE,
)


def update_bigrams(
    bigrams: Tensor, slots: Tensor, tokens: Tensor, previous: Tensor, candidates: Tensor
) -> None:
    """Write the candidates of bigrams; the last row of a cell wins.

    Args:
        bigrams: Int32 `[P, S, 2 + k]`, contiguous, S a power of two: one table for each slot, or
            one for all if P = 1. A cell contains the two tokens and their candidates.
        slots: Int64 `[R]`, the slot of each row's request.
        tokens: Int32 `[R]`, the last token of each bigram; a row of -1 is skipped.
        previous: Int32 `[R]`, the token before it; a row of -1 is skipped.
        candidates: Int32 `[R, k]`, the candidates after each bigram.

    Raises:
        ValueError: Shapes do not fit, or the table is not contiguous.
    """
    rows, k = candidates.shape
    if (
        bigrams.dim() != 3
        or bigrams.shape[2] != k + 2
        or not bigrams.is_contiguous()
        or any(each.shape != (rows,) for each in (slots, tokens, previous))
    ):
        shapes = [[*each.shape] for each in (bigrams, slots, tokens, previous, candidates)]
        raise ValueError(f"expected [P, S, 2 + k], contiguous, 3 x [R] and [R, k], not {shapes}")
    _UPDATE_BIGRAMS.on(bigrams)(bigrams, slots, tokens, previous, candidates)
