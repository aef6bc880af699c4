"""What may follow a node of a draft tree, and where each candidate comes from.

A node offers the token that came after the longest suffix of its path that stood in the request's
text before (the copy), then the candidates of its token and the one before it, then those of its
token; each once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._triton import jit, tl
from tree_kernels.context import LONGEST, Contexts, copies, find_copies
from tree_kernels.pairs import pair_cells, pair_hash

TOP = 8
"""Candidates of a row, and children that are kept of a node."""

PAIR_STATES = TOP + 2
ROW_STATES = TOP + 1
ALONE = -2
"""Stands before a token, in a table of pairs, where that holds a row of a request's own."""

ORIGINS = (2 * LONGEST + 1) * PAIR_STATES * ROW_STATES
"""An origin is (copy x PAIR_STATES + pair) x ROW_STATES + row.

copy: 0 where no suffix was found; its length if the candidate is the copy; that and LONGEST if
another candidate is. pair: its rank from 1 on in the pair's row, 0 if it is not there, TOP + 1 if
there is no such row. row: its rank from 1 on in the token's row, 0 if it is not in there."""


@jit
def _find_pair(
    pairs: tl.tensor, cells: tl.tensor, before: tl.tensor, token: tl.tensor, TOP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The cells of pairs of tokens `[W]`, and whether they are theirs."""
    cell = pairs + (pair_hash(before, token).to(tl.int64) & (cells - 1)) * (TOP + 2)
    return cell, (tl.load(cell) == before) & (tl.load(cell + 1) == token)


@jit
def node_offers(
    matrix: tl.tensor,
    pairs: tl.tensor,
    text: tl.tensor,
    index: tl.tensor,
    vocab: tl.tensor,
    pair_cells: tl.tensor,
    cells: tl.tensor,
    suffix: tl.tuple,
    lane: tl.tensor,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
    TOP: tl.constexpr,
    ALONE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`offers` in a kernel: of one request's nodes, whose suffix is a tuple of columns [W].

    pairs: the request's own table. lane: [1, L], L > 2 TOP, from 0 on. Answers are [W, L].
    """
    before = suffix[LONGEST - 2]
    token = suffix[LONGEST - 1]
    copy, matched = find_copies(text, index, cells, suffix, LONGEST, GRAMS)
    pair, paired = _find_pair(pairs, pair_cells, before, token, TOP)
    paired &= before >= 0
    row, known = _find_pair(pairs, pair_cells, tl.full(token.shape, ALONE, tl.int32), token, TOP)
    row = tl.where(known, row + 2, matrix + token.to(tl.int64) * TOP)
    known = (token >= 0) & (known | (token < vocab))
    of_pair = (lane > 0) & (lane <= TOP)
    of_row = (lane > TOP) & (lane <= 2 * TOP)
    offered = tl.load(pair[:, None] + 1 + lane, mask=paired[:, None] & of_pair, other=-1)
    from_row = row[:, None] + lane - TOP - 1
    offered = tl.where(of_row, tl.load(from_row, mask=known[:, None] & of_row, other=-1), offered)
    offered = tl.where(lane == 0, copy[:, None], offered)
    in_pair = tl.zeros_like(offered)
    in_row = tl.zeros_like(offered)
    for rank in tl.static_range(TOP):
        likely = tl.load(pair + 2 + rank, mask=paired, other=-1)
        in_pair = tl.where((in_pair == 0) & (offered == likely[:, None]), rank + 1, in_pair)
        likely = tl.load(row + rank, mask=known, other=-1)
        in_row = tl.where((in_row == 0) & (offered == likely[:, None]), rank + 1, in_row)
    is_copy = offered == copy[:, None]
    # A later offer of the same token has another rank than its own, or one in an earlier row.
    first = (of_pair & (in_pair == lane)) | (of_row & (in_pair == 0) & (in_row == lane - TOP))
    first = (lane == 0) | (first & (offered != copy[:, None]))
    state = tl.where(is_copy, matched[:, None], LONGEST + matched[:, None])
    state = tl.where(matched[:, None] == 0, 0, state)
    in_pair = tl.where(paired[:, None], in_pair, TOP + 1)
    origin = (state * (TOP + 2) + in_pair) * (TOP + 1) + in_row
    return tl.where(first, offered, -1), origin


def _looked_up(
    pairs: Tensor, slots: Tensor, before: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """What the slots' tables hold of two tokens, `[B, W, TOP]`, and whether it is theirs."""
    table = slots[:, None] if len(pairs) > 1 else torch.zeros_like(slots)[:, None]
    cell = pairs[table, pair_cells(before, tokens, pairs.shape[1])]
    return cell[..., 2:], (cell[..., 0] == before) & (cell[..., 1] == tokens)


def _rank(row: Tensor, tokens: Tensor) -> Tensor:
    """The rank from 1 on of `tokens [..., C]` in `row [..., TOP]`; 0 where they are not in it."""
    same = row[..., None, :] == tokens[..., :, None]
    return torch.where(same.any(-1), same.int().argmax(-1) + 1, 0)


def offers(
    matrix: Tensor, pairs: Tensor, contexts: Contexts, slots: Tensor, suffix: Tensor
) -> tuple[Tensor, Tensor]:
    """What nodes offer: tokens `[B, W, 2 TOP + 1]`, -1 for none, and their origins. On a CPU.

    matrix, pairs and contexts as in `growth.grow`; slots: int64 [B]; suffix: integers
    [B, W, LONGEST], each node's last tokens, -1 before the text's beginning.
    """
    token = suffix[..., -1].long()
    copy, matched = copies(contexts, slots, suffix)
    known = (token >= 0) & (token < matrix.shape[0])
    row = matrix[token.clamp(0, matrix.shape[0] - 1)].masked_fill(~known[..., None], -1)
    alone = torch.full_like(suffix[..., -1], ALONE)
    own, is_own = _looked_up(pairs, slots, alone, suffix[..., -1])
    row = torch.where((is_own & (token >= 0))[..., None], own, row)
    likely, paired = _looked_up(pairs, slots, suffix[..., -2], suffix[..., -1])
    paired &= suffix[..., -2] >= 0
    likely = likely.masked_fill(~paired[..., None], -1)
    offered = torch.cat((copy[..., None], likely, row), -1)
    earlier = (offered[..., :, None] == offered[..., None, :]).tril(-1).any(-1)
    is_copy = offered == copy[..., None]
    state = torch.where(is_copy, matched[..., None], LONGEST + matched[..., None])
    state = state.masked_fill(matched[..., None] == 0, 0)
    in_pair = torch.where(paired[..., None], _rank(likely, offered), TOP + 1)
    origins = (state * PAIR_STATES + in_pair) * ROW_STATES + _rank(row, offered)
    return offered.masked_fill(earlier, -1), origins
