"""What the target said after two tokens, kept in a table by their hash: a pair takes the cell of
another that has the same."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, tl, use_triton
from tree_kernels.adjacency import update_adjacency
from tree_kernels.context import mixed, ngram_cells

_UPDATE = NativeFunction("pairs.cpp", "update_pairs", "piippppii")
_NONE = -1
_ROWS = 256  # compared at once


def pair_cells(before: Tensor, tokens: Tensor, cells: int) -> Tensor:
    """Where pairs of tokens stand in a table of `cells` rows, int64 like `tokens`."""
    return ngram_cells(torch.stack((before, tokens), -1), cells)


@jit
def pair_hash(before: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The hash of pairs, uint32; a table's cells are a power of two."""
    return mixed(mixed(tl.full(token.shape, 2, tl.uint32), before), token)


@jit(do_not_specialize=["slots", "tokens", "before", "rows"])
def _update_kernel(
    pairs: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    before: tl.tensor,
    candidates: tl.tensor,
    rows: tl.tensor,
    cells: tl.tensor,
    table_cells: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program a row, which writes unless a later row has its cell.

    table_cells: from one slot's table to the next; 0 if all have one.
    """
    row = tl.program_id(0)
    own = row + tl.arange(0, 1)
    token = tl.load(tokens + own)
    first = tl.load(before + own)
    slot = tl.load(slots + own)
    cell = (pair_hash(first, token).to(tl.int64) & (cells - 1)) + slot * table_cells
    later = tl.full([], 0, tl.int32)
    for start in range(row + 1, rows, ROWS):
        offsets = start + tl.arange(0, ROWS)
        inside = offsets < rows
        others = tl.load(tokens + offsets, mask=inside, other=-1)
        firsts = tl.load(before + offsets, mask=inside, other=-1)
        theirs = tl.load(slots + offsets, mask=inside, other=0) * table_cells
        theirs += pair_hash(firsts, others).to(tl.int64) & (cells - 1)
        same = (theirs == cell) & inside & (others >= 0) & (firsts != -1)
        later += tl.sum(same.to(tl.int32), 0)
    # The interpreter cannot combine a scalar condition with one of a block.
    writes = (token >= 0) & (first != -1) & (tl.full([1], 0, tl.int32) + later == 0)
    to = pairs + cell * (K + 2)
    tl.store(to, first, mask=writes)
    tl.store(to + 1, token, mask=writes)
    lane = tl.arange(0, K_PAD)
    found = tl.load(candidates + row.to(tl.int64) * K + lane, mask=lane < K, other=0)
    tl.store(to + 2 + lane, found, mask=lane < tl.where(writes, K, 0))


def _update_triton(
    pairs: Tensor, slots: Tensor, tokens: Tensor, before: Tensor, candidates: Tensor
) -> None:
    rows, k = candidates.shape
    if rows == 0:
        return
    tables, cells, _ = pairs.shape
    _update_kernel[(rows,)](
        *(pairs, slots.contiguous(), tokens.contiguous(), before.contiguous()),
        *(candidates.contiguous(), rows, cells, cells if tables > 1 else 0),
        K=k,
        K_PAD=next_power_of_2(k),
        ROWS=_ROWS,
    )


def _update_reference(
    pairs: Tensor, slots: Tensor, tokens: Tensor, before: Tensor, candidates: Tensor
) -> None:
    tables, size, _ = pairs.shape
    cells = pair_cells(before, tokens, size)
    if tables > 1:
        cells += slots * size
    known = (tokens >= 0) & (before != _NONE)
    rows = torch.cat((before[:, None], tokens[:, None], candidates), 1)
    update_adjacency(pairs.flatten(0, 1), torch.where(known, cells, _NONE).int(), rows)


def update_pairs(
    pairs: Tensor, slots: Tensor, tokens: Tensor, before: Tensor, candidates: Tensor
) -> None:
    """Write what followed pairs of tokens; of rows with the same cell the last one wins.

    Args:
        pairs: int32 [P, S, 2 + k], contiguous, S a power of two: a table for each slot, or with
            P = 1 one for all. A cell holds its pair and what followed it.
        slots: int64 [R], of the rows' requests.
        tokens: int32 [R]; -1 to skip a row.
        before: int32 [R], the token before each; -1 to skip a row.
        candidates: int32 [R, k].

    Raises:
        ValueError: shapes that do not fit, or a table that is not contiguous.
    """
    rows, k = candidates.shape
    if (
        pairs.dim() != 3
        or pairs.shape[2] != k + 2
        or not pairs.is_contiguous()
        or any(each.shape != (rows,) for each in (slots, tokens, before))
    ):
        shapes = [[*each.shape] for each in (pairs, slots, tokens, before, candidates)]
        raise ValueError(f"expected [P, S, 2 + k], contiguous, [R] thrice and [R, k], not {shapes}")
    if use_triton(pairs):
        _update_triton(pairs, slots, tokens, before, candidates)
        return
    update = _UPDATE.on(pairs)
    if update is None:
        _update_reference(pairs, slots, tokens, before, candidates)
        return
    slots, tokens, before, candidates = (
        each.contiguous() for each in (slots.long(), tokens.int(), before.int(), candidates.int())
    )
    update(
        *(pairs.data_ptr(), *pairs.shape[:2], slots.data_ptr(), tokens.data_ptr()),
        *(before.data_ptr(), candidates.data_ptr(), rows, k),
    )
