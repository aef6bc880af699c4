"""The candidates for the children of a node, and the source of each.

The candidates of a node are, in this order and without duplicates: the token that followed the
longest suffix of the node's path that occurred earlier in the request's text (the n-gram match),
the row of its last two tokens in the bigram table, and the row of its token in the adjacency
matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._triton import jit, tl
from tree_kernels.bigrams import bigram_cells, bigram_hash
from tree_kernels.ngrams import LONGEST, NgramIndex, find_matches, match_ngrams

TOP = 8
"""Candidates in a row of a table, and the maximum number of children of a node."""

BIGRAM_STATES = TOP + 2
"""States of a candidate by the bigram table; see `NUM_SOURCES`."""

ROW_STATES = TOP + 1
"""States of a candidate by the adjacency matrix; see `NUM_SOURCES`."""

ALONE = -2
"""Stored as the previous token in a private bigram table: the cell is the request's own row of a
single token, which is used instead of the adjacency matrix's row."""

NUM_SOURCES = (2 * LONGEST + 1) * BIGRAM_STATES * ROW_STATES
"""The number of candidate sources: source = (match x BIGRAM_STATES + bigram) x ROW_STATES + row.

- match: 0 if no suffix occurred before; n if a suffix of n tokens did and the candidate followed
  it there; n + LONGEST if another token followed it.
- bigram: the candidate's rank, from 1, in the row of the bigram table; 0 if it is not in that row;
  TOP + 1 if the table has no such row.
- row: the candidate's rank, from 1, in the row of its parent's token; 0 if it is not in that row.
"""


@jit
def _find_bigram(
    bigrams: tl.tensor, cells: tl.tensor, previous: tl.tensor, token: tl.tensor, TOP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The cells of bigrams `[W]`, and whether they contain these bigrams."""
    cell = bigrams + (bigram_hash(previous, token).to(tl.int64) & (cells - 1)) * (TOP + 2)
    return cell, (tl.load(cell) == previous) & (tl.load(cell + 1) == token)


@jit
def node_candidates(
    matrix: tl.tensor,
    bigrams: tl.tensor,
    text: tl.tensor,
    index: tl.tensor,
    vocab: tl.tensor,
    bigram_cells: tl.tensor,
    cells: tl.tensor,
    suffix: tl.tuple,
    lane: tl.tensor,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
    TOP: tl.constexpr,
    ALONE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`find_candidates` in a kernel, for W nodes of one request.

    Args:
        matrix: The adjacency matrix.
        bigrams: The bigram table of the request.
        text: The request's text.
        index: The request's n-gram index.
        vocab: Number of rows of the matrix.
        bigram_cells: Number of cells of the bigram table.
        cells: Number of cells of the n-gram index.
        suffix: LONGEST columns `[W]`: the last tokens of each node's path.
        lane: `[1, L]` with L > 2 TOP, the numbers from 0 to L - 1.

    Returns:
        Tokens and sources, `[W, L]`.
    """
    previous = suffix[LONGEST - 2]
    token = suffix[LONGEST - 1]
    match, matched = match_ngrams(text, index, cells, suffix, LONGEST, GRAMS)
    bigram, has_bigram = _find_bigram(bigrams, bigram_cells, previous, token, TOP)
    has_bigram &= previous >= 0
    row, known = _find_bigram(
        bigrams, bigram_cells, tl.full(token.shape, ALONE, tl.int32), token, TOP
    )
    row = tl.where(known, row + 2, matrix + token.to(tl.int64) * TOP)
    known = (token >= 0) & (known | (token < vocab))
    of_bigram = (lane > 0) & (lane <= TOP)
    of_row = (lane > TOP) & (lane <= 2 * TOP)
    offered = tl.load(bigram[:, None] + 1 + lane, mask=has_bigram[:, None] & of_bigram, other=-1)
    from_row = row[:, None] + lane - TOP - 1
    offered = tl.where(of_row, tl.load(from_row, mask=known[:, None] & of_row, other=-1), offered)
    offered = tl.where(lane == 0, match[:, None], offered)
    in_bigram = tl.zeros_like(offered)
    in_row = tl.zeros_like(offered)
    for rank in tl.static_range(TOP):
        likely = tl.load(bigram + 2 + rank, mask=has_bigram, other=-1)
        in_bigram = tl.where((in_bigram == 0) & (offered == likely[:, None]), rank + 1, in_bigram)
        likely = tl.load(row + rank, mask=known, other=-1)
        in_row = tl.where((in_row == 0) & (offered == likely[:, None]), rank + 1, in_row)
    is_match = offered == match[:, None]
    # A duplicate has a rank other than its lane's, or a rank in an earlier row.
    first = (of_bigram & (in_bigram == lane)) | (of_row & (in_bigram == 0) & (in_row == lane - TOP))
    first = (lane == 0) | (first & (offered != match[:, None]))
    state = tl.where(is_match, matched[:, None], LONGEST + matched[:, None])
    state = tl.where(matched[:, None] == 0, 0, state)
    in_bigram = tl.where(has_bigram[:, None], in_bigram, TOP + 1)
    source = (state * (TOP + 2) + in_bigram) * (TOP + 1) + in_row
    return tl.where(first, offered, -1), source


def _find_rows(
    bigrams: Tensor, slots: Tensor, previous: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows of bigrams in the slots' tables, `[B, W, TOP]`, and whether they were found."""
    table = slots[:, None] if len(bigrams) > 1 else torch.zeros_like(slots)[:, None]
    cell = bigrams[table, bigram_cells(previous, tokens, bigrams.shape[1])]
    return cell[..., 2:], (cell[..., 0] == previous) & (cell[..., 1] == tokens)


def _rank(row: Tensor, tokens: Tensor) -> Tensor:
    """The rank, from 1, of `tokens [..., C]` in `row [..., TOP]`; 0 for tokens not in the row."""
    same = row[..., None, :] == tokens[..., :, None]
    return torch.where(same.any(-1), same.int().argmax(-1) + 1, 0)


def find_candidates(
    matrix: Tensor, bigrams: Tensor, ngrams: NgramIndex, slots: Tensor, suffix: Tensor
) -> tuple[Tensor, Tensor]:
    """The PyTorch reference for the candidates of W nodes of each request.

    Args:
        matrix: The adjacency matrix, as in `expansion.expand_trees`.
        bigrams: The bigram tables, as in `expansion.expand_trees`.
        ngrams: The texts and their n-gram index.
        slots: Int64 `[B]`, the slots of the requests.
        suffix: Integers `[B, W, LONGEST]`, the last tokens of each node's path; -1 before the
            beginning of the text.

    Returns:
        Tokens `[B, W, 2 TOP + 1]`, -1 where there is no candidate, and their sources.
    """
    token = suffix[..., -1].long()
    match, matched = find_matches(ngrams, slots, suffix)
    known = (token >= 0) & (token < matrix.shape[0])
    row = matrix[token.clamp(0, matrix.shape[0] - 1)].masked_fill(~known[..., None], -1)
    alone = torch.full_like(suffix[..., -1], ALONE)
    own, is_own = _find_rows(bigrams, slots, alone, suffix[..., -1])
    row = torch.where((is_own & (token >= 0))[..., None], own, row)
    likely, has_bigram = _find_rows(bigrams, slots, suffix[..., -2], suffix[..., -1])
    has_bigram &= suffix[..., -2] >= 0
    likely = likely.masked_fill(~has_bigram[..., None], -1)
    offered = torch.cat((match[..., None], likely, row), -1)
    earlier = (offered[..., :, None] == offered[..., None, :]).tril(-1).any(-1)
    is_match = offered == match[..., None]
    state = torch.where(is_match, matched[..., None], LONGEST + matched[..., None])
    state = state.masked_fill(matched[..., None] == 0, 0)
    in_bigram = torch.where(has_bigram[..., None], _rank(likely, offered), TOP + 1)
    sources = (state * BIGRAM_STATES + in_bigram) * ROW_STATES + _rank(row, offered)
    return offered.masked_fill(earlier, -1), sources
