"""The spine of a dynamic tree: a chain of copies below the last level.

All of its tokens are known at once, as it follows one match in the text or in the memory, so its
depth costs no further levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._triton import jit, tl
from tree_kernels.candidates import CandidateTables, find_rows, rank_in, rows_of, sources_of
from tree_kernels.copies import BUCKETS, Pointers, bucket, bucket_of, place_in_text, text_places
from tree_kernels.root_matches import MAX_MATCH

MIN_SCORE = 0.2
"""Least score of a spine's nodes. Less likely copies would take the place of other nodes."""

CAP = 0.9999
"""Greatest acceptance probability of one node of a spine, so that no rounding in a parallel product
lifts a node above its parent."""


@jit
def spine_of(
    text: tl.tensor,
    end: tl.tensor,
    memory: tl.tensor,
    places: tl.tensor,
    matrix: tl.tensor,
    bigrams: tl.tensor,
    own: tl.tensor,
    vocab: tl.tensor,
    bigram_cells: tl.tensor,
    own_cells: tl.tensor,
    priors: tl.tensor,
    node: tl.tuple,
    pointers: tl.tuple,
    depth: tl.tensor,
    room: tl.tensor,
    PAD: tl.constexpr,
    TOP: tl.constexpr,
    ALONE: tl.constexpr,
    BUCKETS: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    MIN_SCORE: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`extend_spine` in a kernel, for one node.

    Args:
        text: The request's text, then its length and the memory's ring and number of places.
        matrix: The tables and the number of their cells, as in `rows_of`.
        priors: The acceptance probability of each source.
        node: The token before the node's, the node's token, and its score, scalars.
        pointers: The node's pointers, scalars.
        depth: The node's depth.
        room: Greatest number of nodes.

    Returns:
        Tokens, sources and scores `[PAD]`; -1, 0 and 0 where the spine has ended.
    """
    step = tl.arange(0, PAD)
    # A block, as the interpreter cannot combine a scalar condition with one of a block.
    is_own = pointers[1] + tl.zeros_like(step) >= pointers[3]
    length = tl.maximum(pointers[1], pointers[3])
    # The tokens of the node's children, with those of the two nodes above them.
    token = _copied(text, end, memory, places, pointers, is_own, depth, step)
    above = _copied(text, end, memory, places, pointers, is_own, depth, step - 1)
    above = tl.where(step == 0, node[1], above)
    previous = _copied(text, end, memory, places, pointers, is_own, depth, step - 2)
    previous = tl.where(step == 0, node[0], tl.where(step == 1, node[1], previous))
    bigram, has_bigram, row, known = rows_of(
        matrix, bigrams, own, vocab, bigram_cells, own_cells, previous, above, TOP, ALONE
    )
    in_bigram = tl.where(has_bigram, rank_in(bigram, has_bigram, token, TOP), TOP + 1)
    in_row = rank_in(row, known, token, TOP)
    state = 1 + bucket_of(tl.minimum(length + step, MAX_MATCH)) + tl.where(is_own, 0, BUCKETS)
    source = (state * (TOP + 2) + in_bigram) * (TOP + 1) + in_row
    ended = (token < 0) | (step >= room) | (length + tl.zeros_like(step) == 0)
    prior = tl.minimum(tl.load(priors + source, mask=token >= 0, other=0.0), CAP)
    score = tl.cumprod(tl.where(step == 0, node[2] * prior, prior), 0)
    score = tl.where(tl.cumsum(ended.to(tl.int32), 0) > 0, 0.0, score)
    there = score >= MIN_SCORE
    return tl.where(there, token, -1), tl.where(there, source, 0), tl.where(there, score, 0.0)


@jit
def _copied(
    text: tl.tensor,
    end: tl.tensor,
    memory: tl.tensor,
    places: tl.tensor,
    pointers: tl.tuple,
    is_own: tl.tensor,
    depth: tl.tensor,
    step: tl.tensor,
) -> tl.tensor:
    """The token that each step copies, `[PAD]`; -1 before step 0 and where there is none."""
    place = place_in_text(pointers[0] + step, end, depth + step)
    from_text = tl.load(text + place, mask=is_own & (step >= 0) & (place >= 0), other=-1)
    place = (pointers[2] + step) & (places - 1)
    from_memory = tl.load(memory + place, mask=(is_own == 0) & (step >= 0), other=-1)
    return tl.where(is_own, from_text, from_memory)


def extend_spine(
    tables: CandidateTables,
    slots: Tensor,
    suffix: Tensor,
    score: Tensor,
    pointers: Pointers,
    depth: int,
    room: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The PyTorch reference for the spine below one node of each request.

    Args:
        tables: The tables.
        slots: Int64 `[B]`, the slots of the requests.
        suffix: Integers `[B, n]`, n >= 2, the last tokens of the node's path.
        score: Float32 `[B]`, the node's score.
        pointers: The node's pointers, `[B]` each.
        depth: The node's depth.
        room: Number of columns of the result.

    Returns:
        Tokens, sources and scores `[B, room]`; -1, 0 and 0 where the spine has ended.
    """
    step = torch.arange(room, device=slots.device)
    ends = tables.ngrams.lengths[slots].long()[:, None]
    own, memory = (each.long()[:, None] + step for each in (pointers.own, pointers.memory))
    place = text_places(own, ends, depth + step)
    from_text = tables.ngrams.history[slots[:, None], place.clamp(min=0)].masked_fill(place < 0, -1)
    ring = tables.memory.tokens
    is_own = (pointers.own_length >= pointers.memory_length)[:, None]
    tokens = torch.where(is_own, from_text, ring[memory % len(ring)])
    length = torch.maximum(pointers.own_length, pointers.memory_length)[:, None]
    path = torch.cat((suffix[:, -2:].int(), tokens), 1)
    rows = find_rows(tables, slots, path.unfold(1, 2, 1)[:, :-1])
    state = 1 + bucket((length + step).clamp(min=1, max=MAX_MATCH)) + ~is_own * BUCKETS
    source = sources_of(rows, state[..., None], tokens[..., None])[..., 0]
    ended = ((tokens < 0) | (length == 0)).int().cumsum(1) > 0
    prior = tables.priors[source].clamp(max=CAP).masked_fill(ended, 0)
    scores = torch.cat((score[:, None] * prior[:, :1], prior[:, 1:]), 1).cumprod(1)
    gone = scores < MIN_SCORE
    return (
        tokens.masked_fill(gone, -1),
        source.masked_fill(gone, 0),
        scores.masked_fill(gone, 0),
    )
