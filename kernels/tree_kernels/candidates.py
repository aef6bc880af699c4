"""The candidates for the children of a node, and the source of each.

The candidates of a node are, in this order and without duplicates: its copies (`copies.py`), the
row of its last two tokens in the bigram table, and the row of its token in the adjacency matrix.
A request may have rows of its own, which come before the shared ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._triton import jit, tl
from tree_kernels.bigrams import bigram_cells, bigram_hash
from tree_kernels.copies import COPIES, COPY_STATES, Copies
from tree_kernels.memory import TextMemory
from tree_kernels.ngrams import NgramIndex

TOP = 8
"""Candidates in a row of a table, and the maximum number of children of a node."""

OFFERED = COPIES + 2 * TOP
"""Greatest number of candidates of a node."""

BIGRAM_STATES = TOP + 2
"""States of a candidate by the bigram table; see `NUM_SOURCES`."""

ROW_STATES = TOP + 1
"""States of a candidate by the adjacency matrix; see `NUM_SOURCES`."""

ALONE = -2
"""Stored as the previous token in a request's own table: the cell is its row of a single token."""

NUM_SOURCES = COPY_STATES * BIGRAM_STATES * ROW_STATES
"""The number of candidate sources: source = (copy x BIGRAM_STATES + bigram) x ROW_STATES + row.

- copy: the candidate's state by the copies of its parent, see `copies.COPY_STATES`.
- bigram: the candidate's rank, from 1, in the row of its parent's last two tokens; 0 if it is not
  in that row; TOP + 1 if there is no such row.
- row: the candidate's rank, from 1, in the row of its parent's token; 0 if it is not in that row.
"""


@dataclass(frozen=True)
class CandidateTables:
    """Everything that candidates are looked up in.

    Attributes:
        matrix: Int32 `[V, 8]`, contiguous, the adjacency matrix; -1 where there is no candidate.
        bigrams: Int32 `[S, 10]`, contiguous, S a power of two, the bigram table that all requests
            share. A cell contains two tokens and their candidates.
        own: Int32 `[P, C, 10]`, contiguous, C a power of two: a table for each slot, whose rows
            come before those of `bigrams`. Where the first token of a cell is `ALONE`, its
            candidates come before the matrix's row of the second. P = 1 without own tables, which
            are then one table of empty cells.
        ngrams: The requests' texts and their index.
        memory: The memory of finished texts.
        priors: Float32 `[NUM_SOURCES]`, the acceptance probability of each source, in [0, 1].
    """

    matrix: Tensor
    bigrams: Tensor
    own: Tensor
    ngrams: NgramIndex
    memory: TextMemory
    priors: Tensor

    def check(self) -> None:
        """Check the shapes.

        Raises:
            ValueError: They do not fit.
        """
        matrix, bigrams, own = self.matrix, self.bigrams, self.own
        if matrix.dim() != 2 or matrix.shape[1] != TOP or not matrix.is_contiguous():
            raise ValueError(f"matrix must be [V, {TOP}] and contiguous, not {[*matrix.shape]}")
        for name, table, dim in (("bigrams", bigrams, 2), ("own", own, 3)):
            cells = table.shape[-2]
            power = cells > 0 and cells & (cells - 1) == 0
            row = table.dim() == dim and table.shape[-1] == TOP + 2
            if not row or not table.is_contiguous() or not power:
                wanted = "[P, 2^n, " if dim == 3 else "[2^n, "
                raise ValueError(
                    f"{name} must be {wanted}{TOP + 2}], contiguous, not {[*table.shape]}"
                )
        if self.priors.shape != (NUM_SOURCES,):
            raise ValueError(f"priors {[*self.priors.shape]} must be [{NUM_SOURCES}]")

    @property
    def own_stride(self) -> int:
        """Integers from one slot's own table to the next; 0 if there are no own tables."""
        return self.own.stride(0) if self.own.shape[0] > 1 else 0


@jit
def _find_bigram(
    table: tl.tensor, cells: tl.tensor, previous: tl.tensor, token: tl.tensor, TOP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The rows of bigrams `[W]`, and whether the table contains them."""
    cell = table + (bigram_hash(previous, token).to(tl.int64) & (cells - 1)) * (TOP + 2)
    return cell + 2, (tl.load(cell) == previous) & (tl.load(cell + 1) == token)


@jit
def rows_of(
    matrix: tl.tensor,
    bigrams: tl.tensor,
    own: tl.tensor,
    vocab: tl.tensor,
    bigram_cells: tl.tensor,
    own_cells: tl.tensor,
    previous: tl.tensor,
    token: tl.tensor,
    TOP: tl.constexpr,
    ALONE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The rows of the last two tokens and of the last token `[W]`, and whether each is known."""
    bigram, has_bigram = _find_bigram(bigrams, bigram_cells, previous, token, TOP)
    ours, is_ours = _find_bigram(own, own_cells, previous, token, TOP)
    bigram = tl.where(is_ours, ours, bigram)
    has_bigram = (has_bigram | is_ours) & (previous >= 0)
    alone = tl.full(token.shape, ALONE, tl.int32)
    row, is_ours = _find_bigram(own, own_cells, alone, token, TOP)
    row = tl.where(is_ours, row, matrix + token.to(tl.int64) * TOP)
    return bigram, has_bigram, row, (token >= 0) & (is_ours | (token < vocab))


@jit
def rank_in(row: tl.tensor, known: tl.tensor, token: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """The rank, from 1, of `token [W]` in the rows `[W]`; 0 for a token that is not in its row."""
    found = tl.zeros_like(token)
    for rank in tl.static_range(TOP):
        likely = tl.load(row + rank, mask=known, other=-1)
        found = tl.where((found == 0) & (token == likely), rank + 1, found)
    return found


@jit
def node_candidates(
    rows: tl.tuple,
    tokens: tl.tuple,
    states: tl.tuple,
    rest: tl.tensor,
    lane: tl.tensor,
    COPIES: tl.constexpr,
    TOP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`find_candidates` in a kernel, for W nodes of one request.

    Args:
        rows: What `rows_of` returned for the nodes.
        tokens: A column `[W]` of tokens for each copy, from `node_copies`.
        states: A column `[W]` of states for each copy.
        rest: `[W]`, the state of a candidate that is no copy.
        lane: `[1, L]` with L >= COPIES + 2 TOP, the numbers from 0 to L - 1.

    Returns:
        Tokens and sources, `[W, L]`.
    """
    bigram, has_bigram, row, known = rows
    of_bigram = (lane >= COPIES) & (lane < COPIES + TOP)
    of_row = (lane >= COPIES + TOP) & (lane < COPIES + 2 * TOP)
    place = bigram[:, None] + lane - COPIES
    offered = tl.load(place, mask=has_bigram[:, None] & of_bigram, other=-1)
    place = row[:, None] + lane - COPIES - TOP
    offered = tl.where(of_row, tl.load(place, mask=known[:, None] & of_row, other=-1), offered)
    in_bigram = tl.zeros_like(offered)
    in_row = tl.zeros_like(offered)
    for rank in tl.static_range(TOP):
        likely = tl.load(bigram + rank, mask=has_bigram, other=-1)
        in_bigram = tl.where((in_bigram == 0) & (offered == likely[:, None]), rank + 1, in_bigram)
        likely = tl.load(row + rank, mask=known, other=-1)
        in_row = tl.where((in_row == 0) & (offered == likely[:, None]), rank + 1, in_row)
    # A duplicate has a rank other than its lane's, or a rank in an earlier row.
    first = of_bigram & (in_bigram == lane - COPIES + 1)
    first |= of_row & (in_bigram == 0) & (in_row == lane - COPIES - TOP + 1)
    state = rest[:, None] + tl.zeros_like(offered)
    for copy in tl.static_range(COPIES):
        token = tokens[copy]
        first &= offered != token[:, None]
        here = lane == copy
        offered = tl.where(here, token[:, None], offered)
        state = tl.where(here, states[copy][:, None], state)
        rank = rank_in(bigram, has_bigram, token, TOP)
        in_bigram = tl.where(here, rank[:, None], in_bigram)
        rank = rank_in(row, known, token, TOP)
        in_row = tl.where(here, rank[:, None], in_row)
    first |= lane < COPIES
    in_bigram = tl.where(has_bigram[:, None], in_bigram, TOP + 1)
    source = (state * (TOP + 2) + in_bigram) * (TOP + 1) + in_row
    return tl.where(first, offered, -1), source


def _find_row(
    table: Tensor, slots: Tensor, previous: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows of bigrams in tables `[P, S, 10]`, `[B, W, TOP]`, and whether they were found."""
    which = slots[:, None] if table.shape[0] > 1 else torch.zeros_like(slots)[:, None]
    cell = table[which, bigram_cells(previous, tokens, table.shape[1])]
    return cell[..., 2:], (cell[..., 0] == previous) & (cell[..., 1] == tokens)


def find_rows(tables: CandidateTables, slots: Tensor, suffix: Tensor) -> tuple[Tensor, ...]:
    """The PyTorch reference for `rows_of`: rows of -1 where they are unknown.

    Args:
        tables: The tables.
        slots: Int64 `[B]`, the slots of the requests.
        suffix: Integers `[B, W, n]` with n >= 2, the last tokens of each node's path; -1 before the
            beginning of the text.

    Returns:
        The row of the last two tokens `[B, W, TOP]`, whether it is known `[B, W]`, and the row of
        the last token `[B, W, TOP]`.
    """
    previous, token = suffix[..., -2], suffix[..., -1]
    vocab = tables.matrix.shape[0]
    known = (token >= 0) & (token < vocab)
    row = tables.matrix[token.long().clamp(0, vocab - 1)].masked_fill(~known[..., None], -1)
    own, is_own = _find_row(tables.own, slots, torch.full_like(token, ALONE), token)
    row = torch.where((is_own & (token >= 0))[..., None], own, row)
    likely, has_bigram = _find_row(tables.bigrams[None], slots, previous, token)
    own, is_own = _find_row(tables.own, slots, previous, token)
    likely = torch.where(is_own[..., None], own, likely)
    has_bigram = (has_bigram | is_own) & (previous >= 0)
    return likely.masked_fill(~has_bigram[..., None], -1), has_bigram, row


def sources_of(rows: tuple[Tensor, ...], state: Tensor, tokens: Tensor) -> Tensor:
    """The sources of candidates `tokens [B, W, L]` with copy states `state [B, W, L]`."""
    likely, has_bigram, row = rows
    in_bigram = torch.where(has_bigram[..., None], _rank(likely, tokens), TOP + 1)
    return (state * BIGRAM_STATES + in_bigram) * ROW_STATES + _rank(row, tokens)


def _rank(row: Tensor, tokens: Tensor) -> Tensor:
    """The rank, from 1, of `tokens [..., L]` in `row [..., TOP]`; 0 for tokens not in the row."""
    same = row[..., None, :] == tokens[..., :, None]
    return torch.where(same.any(-1), same.int().argmax(-1) + 1, 0)


def find_candidates(rows: tuple[Tensor, ...], copies: Copies) -> tuple[Tensor, Tensor]:
    """The PyTorch reference for the candidates of W nodes of each request.

    Args:
        rows: What `find_rows` returned for the nodes.
        copies: The nodes' copies.

    Returns:
        Tokens `[B, W, OFFERED]`, -1 where there is no candidate, and their sources.
    """
    likely, _, row = rows
    offered = torch.cat((copies.tokens, likely, row), -1)
    earlier = (offered[..., :, None] == offered[..., None, :]).tril(-1).any(-1)
    state = torch.cat(
        (copies.states, copies.rest[..., None].expand(*likely.shape[:2], 2 * TOP)), -1
    )
    return offered.masked_fill(earlier, -1), sources_of(rows, state, offered)
