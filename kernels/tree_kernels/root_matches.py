"""The longest matches of a request's text at the root: in the text itself and in the memory.

Below the root a draft follows these matches token by token, so the memory is looked up once per
request and step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, tl
from tree_kernels.memory import MEMORY_NGRAMS, TextMemory
from tree_kernels.ngrams import (
    AT_ROOT,
    GRAMS,
    LONGEST,
    NgramIndex,
    gram_lengths,
    mixed,
    ngram_cells,
)

MAX_MATCH = 64
"""Tokens of a match that are compared; a longer match counts as one of this length."""

_MATCH = CppFunction("root_matches.cpp", "root_matches", "pippipipiipp")


@jit
def _longest(
    text: tl.tensor,
    end: tl.tensor,
    other: tl.tensor,
    mask: tl.tensor,
    place: tl.tensor,
    lane: tl.tensor,
    MAX: tl.constexpr,
    LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The place of the lane whose match is longest and the length; the last lane wins a tie.

    Args:
        text: The request's text, whose last MAX tokens are compared.
        end: Length of the text.
        other: The text in which matches end at `place`, `[LANES]`; 0 where there is none.
        mask: Added to places by `&`.
    """
    back = tl.arange(0, MAX)[None, :]
    there = place[:, None] - 1 - back
    inside = (place[:, None] > 0) & (end - 1 - back >= 0)
    mine = tl.load(text + end - 1 - back, mask=end - 1 - back >= 0, other=-1)
    theirs = tl.load(other + (there & mask), mask=inside & (there >= 0), other=-2)
    differs = tl.where(mine == theirs, MAX, back)
    length = tl.min(differs, 1)
    best = tl.max(length * LANES + lane, 0)
    found = tl.sum(tl.where(length * LANES + lane == best, place, 0), 0)
    return found, best // LANES


@jit
def _match_kernel(
    history: tl.tensor,
    lengths: tl.tensor,
    index: tl.tensor,
    memory: tl.tensor,
    memory_index: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    cells: tl.tensor,
    places: tl.tensor,
    memory_cells: tl.tensor,
    LONGEST: tl.constexpr,
    AT_ROOT: tl.constexpr,
    GRAMS: tl.constexpr,
    SHORTEST: tl.constexpr,
    NGRAMS: tl.constexpr,
    MAX: tl.constexpr,
) -> None:
    """Find the matches; one program per request."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    text = history + slot * length
    end = tl.load(lengths + slot)
    lane = tl.arange(0, GRAMS)
    n = gram_lengths(LONGEST, AT_ROOT, GRAMS)
    remembered = SHORTEST << lane
    hashed = n.to(tl.uint32)
    memory_hash = remembered.to(tl.uint32)
    for i in tl.static_range(AT_ROOT):
        back = AT_ROOT - i
        token = tl.load(text + end - back, mask=end >= back, other=0)
        hashed = tl.where(n >= back, mixed(hashed, token), hashed)
        memory_hash = tl.where(remembered >= back, mixed(memory_hash, token), memory_hash)
    cell = index + slot * cells + (hashed.to(tl.int64) & (cells - 1))
    place = tl.load(cell, mask=(n > 0) & (n <= end), other=0)
    own, own_length = _longest(text, end, text, -1, place, lane, MAX, GRAMS)
    known = (lane < NGRAMS) & (remembered <= end)
    cell = memory_index + lane * memory_cells + (memory_hash.to(tl.int64) & (memory_cells - 1))
    place = tl.load(cell, mask=known, other=0)
    found, found_length = _longest(text, end, memory, places - 1, place, lane, MAX, GRAMS)
    there = found_length >= SHORTEST
    tl.store(out + request * 4, tl.where(own_length > 0, own, 0))
    tl.store(out + request * 4 + 1, own_length)
    tl.store(out + request * 4 + 2, tl.where(there, found & (places - 1), 0))
    tl.store(out + request * 4 + 3, tl.where(there, found_length, 0))


def _match_triton(ngrams: NgramIndex, memory: TextMemory, slots: Tensor) -> Tensor:
    count = slots.shape[0]
    out = torch.empty(count, 4, dtype=torch.int32, device=slots.device)
    if count:
        _match_kernel[(count,)](
            ngrams.history,
            ngrams.lengths,
            ngrams.index,
            memory.tokens,
            memory.index,
            slots,
            out,
            ngrams.history.shape[1],
            ngrams.index.shape[1],
            memory.tokens.shape[0],
            memory.index.shape[1],
            LONGEST=LONGEST,
            AT_ROOT=AT_ROOT,
            GRAMS=GRAMS,
            SHORTEST=MEMORY_NGRAMS[0],
            NGRAMS=len(MEMORY_NGRAMS),
            MAX=MAX_MATCH,
        )
    return out


def _last_tokens(ngrams: NgramIndex, slots: Tensor, count: int) -> Tensor:
    """The last tokens of each text, int64 `[B, count]`; -1 before its beginning."""
    places = ngrams.lengths[slots].long()[:, None] + torch.arange(-count, 0, device=slots.device)
    tokens = ngrams.history[slots[:, None], places.clamp(min=0)].long()
    return tokens.masked_fill(places < 0, -1)


def _match_reference(ngrams: NgramIndex, memory: TextMemory, slots: Tensor) -> Tensor:
    ends = ngrams.lengths[slots]
    tail = _last_tokens(ngrams, slots, MAX_MATCH)
    back = torch.arange(MAX_MATCH, 0, -1, device=slots.device)
    own = torch.zeros(slots.shape[0], 4, dtype=torch.int32, device=slots.device)
    for n in (*range(1, LONGEST + 1), AT_ROOT):
        place = ngrams.index[slots, ngram_cells(tail[:, -n:], ngrams.index.shape[1])].long()
        place = place.masked_fill(ends < n, 0)
        there = place[:, None] - back
        theirs = ngrams.history[slots[:, None], there.clamp(min=0)].masked_fill(there < 0, -2)
        _keep_longest(own[:, :2], place, theirs == tail, 1)
    for row, n in zip(memory.index, MEMORY_NGRAMS, strict=True):
        position = row[ngram_cells(tail[:, -n:], len(row))].long().masked_fill(ends < n, 0)
        there = position[:, None] - back
        theirs = memory.tokens[there % memory.tokens.shape[0]].masked_fill(there < 0, -2)
        theirs = theirs.masked_fill((theirs < 0) | (position[:, None] == 0), -2)
        place = position % memory.tokens.shape[0]
        _keep_longest(own[:, 2:], place, theirs == tail, MEMORY_NGRAMS[0])
    return own


def _keep_longest(kept: Tensor, place: Tensor, same: Tensor, least: int) -> None:
    """Replace places and lengths `kept [B, 2]` where a match is at least as long."""
    length = same.flip(1).int().cumprod(1).sum(1)
    better = (length >= kept[:, 1]) & (length >= least) & (place >= 0)
    kept[:, 0] = torch.where(better, place, kept[:, 0])
    kept[:, 1] = torch.where(better, length, kept[:, 1])


def _match_cpp(ngrams: NgramIndex, memory: TextMemory, slots: Tensor) -> Tensor:
    out = torch.empty(slots.shape[0], 4, dtype=torch.int32, device=slots.device)
    _MATCH.call(
        *(ngrams.history.data_ptr(), ngrams.history.shape[1], ngrams.lengths.data_ptr()),
        *(ngrams.index.data_ptr(), ngrams.index.shape[1]),
        *(memory.tokens.data_ptr(), memory.tokens.shape[0]),
        *(memory.index.data_ptr(), memory.index.shape[1]),
        *(slots.shape[0], slots.data_ptr(), out.data_ptr()),
    )
    return out


_ROOT_MATCHES = Op(
    "root_matches.root_matches",
    _match_reference,
    triton=_match_triton,
    cpp=_match_cpp,
    needs=_MATCH,
)


def root_matches(ngrams: NgramIndex, memory: TextMemory, slots: Tensor) -> Tensor:
    """The longest text that occurred before and ends as each request's text does.

    Args:
        ngrams: The requests' texts and their index.
        memory: The memory of finished texts.
        slots: Int64 `[B]`, the slots of the requests.

    Returns:
        Int32 `[B, 4]`: the place after the match in the request's own text, its length, the place
        after the match in the memory's ring, its length. A length is 0 if there is no match, and at
        most `MAX_MATCH`. Of equal lengths, the match of the longest n-gram is taken.
    """
    return _ROOT_MATCHES.on(ngrams.history)(ngrams, memory, slots.long().contiguous())
