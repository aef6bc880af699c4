"""Copies: candidates that followed a match of a node's path in the request's text or the memory.

A node has up to `COPIES` of them: what followed the longest match, and what followed shorter ones
if it is another token. Matches in the request's text are looked up at every node (`ngrams.py`);
longer ones, and those in the memory, are found at the root (`root_matches.py`) and followed token
by token, each token making the match one longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._triton import jit, tl
from tree_kernels.memory import TextMemory
from tree_kernels.ngrams import LONGEST, NgramIndex, find_matches, match_ngrams
from tree_kernels.root_matches import MAX_MATCH

COPIES = 3
"""Greatest number of copies of a node."""

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 10, 15, 23, 37)
"""The least length, in tokens, of each bucket of match lengths."""

BUCKETS = len(LENGTHS)

COPY_STATES = 1 + 6 * BUCKETS
"""States of a candidate by the copies of its parent:

- 0: the parent has no copies;
- 1 + b: the candidate followed the longest match, which is in the request's text, of bucket b;
- 1 + BUCKETS + b: the same for a match in the memory;
- 1 + 2 BUCKETS + b, 1 + 3 BUCKETS + b: the candidate followed a shorter match, of bucket b, in the
  text or in the memory;
- 1 + 4 BUCKETS + b, 1 + 5 BUCKETS + b: the candidate is no copy, and the longest match, of bucket
  b, is in the text or in the memory.
"""


@dataclass(frozen=True)
class Pointers:
    """Where a node's path is followed, int32 `[B, W]` each; places without a length are ignored.

    Attributes:
        own: The place after the match in the request's text, which may lie beyond its end.
        own_length: The match's length, 0 if there is none.
        memory: The place after the match in the memory's ring.
        memory_length: The match's length, 0 if there is none.
    """

    own: Tensor
    own_length: Tensor
    memory: Tensor
    memory_length: Tensor


@dataclass(frozen=True)
class Copies:
    """The copies of each node, `[B, W, COPIES]` each, longest match first.

    Attributes:
        tokens: The tokens; -1 where there is no copy.
        states: The state of a candidate that is this copy.
        own: The place of the token in the request's text, which may lie beyond its end; 0 if the
            token follows no match there.
        own_length: The length of that match, 0 if there is none.
        rest: `[B, W]`, the state of a candidate that is no copy.
        memory_token: `[B, W]`, the token that follows in the memory; -1 if there is none.
    """

    tokens: Tensor
    states: Tensor
    own: Tensor
    own_length: Tensor
    rest: Tensor
    memory_token: Tensor


@jit
def bucket_of(length: tl.tensor) -> tl.tensor:
    """The bucket of match lengths of at least 1 in a kernel."""
    bucket = tl.minimum(length, 6) - 1 + (length >= 7).to(tl.int32)
    bucket += (length >= 10).to(tl.int32) + (length >= 15).to(tl.int32)
    return bucket + (length >= 23).to(tl.int32) + (length >= 37).to(tl.int32)


@jit
def place_in_text(place: tl.tensor, end: tl.tensor, depth: tl.tensor) -> tl.tensor:
    """A place of the text with the token at `place`, which may lie beyond the text's end.

    A node of depth d is followed by the text's token `end + d`, so a match repeats the text with a
    period of `end + d - place`. Beyond the end of the text, what is copied is the draft itself,
    which repeats the text one period before.
    """
    period = tl.maximum(end + depth - place, 1)
    return tl.where(place < end, place, end - period + depth % period)


@jit
def _take(values: tl.tensor, at: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(at, values, 0), 1)


@jit
def _next_copy(
    left: tl.tensor,
    token: tl.tensor,
    place: tl.tensor,
    length: tl.tensor,
    order: tl.tensor,
    lane: tl.tensor,
    BUCKETS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The copy of the longest match among the lanes in `left`, and the lanes that are left then."""
    best = tl.max(tl.where(left, order, -1), 1)
    at = left & (order == best[:, None])
    found = tl.where(best >= 0, _take(token, at), -1)
    state = 1 + bucket_of(_take(length, at)) + _take((lane == 0).to(tl.int32), at) * BUCKETS
    same = left & (token == found[:, None])
    own = same & (lane > 0)
    longest = tl.max(tl.where(own, order, -1), 1)
    own = own & (order == longest[:, None])
    left = left & (token != found[:, None])
    return found, tl.where(best >= 0, state, 0), _take(place, own), _take(length, own), left


@jit
def node_copies(
    text: tl.tensor,
    end: tl.tensor,
    index: tl.tensor,
    cells: tl.tensor,
    memory: tl.tensor,
    suffix: tl.tuple,
    pointers: tl.tuple,
    depth: tl.tensor,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
    BUCKETS: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple, tl.tuple, tl.tuple, tl.tensor, tl.tensor]:
    """`find_copies` in a kernel, for W nodes of one request at one depth.

    Args:
        text: The request's text.
        end: Its length.
        index: Its n-gram index.
        cells: Number of cells of the index.
        memory: The memory's ring.
        suffix: LONGEST columns `[W]`: the last tokens of each node's path.
        pointers: The four columns of the nodes' `Pointers`, `[W]`.
        depth: The depth of the nodes.

    Returns:
        As in `Copies`, with a column `[W]` for each copy.
    """
    lane = tl.arange(0, GRAMS)[None, :]
    place, known = match_ngrams(text, index, cells, suffix, LONGEST, GRAMS)
    # Lane 0 has the match in the memory, the last lane the one that is followed in the text.
    followed = place_in_text(pointers[0], end, depth)
    known = tl.where(lane > LONGEST, ((pointers[1] > 0) & (followed >= 0))[:, None], known)
    at = tl.where(lane > LONGEST, followed[:, None], place)
    token = tl.load(text + at, mask=known & (lane > 0), other=-1)
    place = tl.where(lane > LONGEST, pointers[0][:, None], place)
    length = tl.where(lane > LONGEST, pointers[1][:, None], lane)
    from_memory = pointers[3] > 0
    remembered = tl.load(memory + pointers[2], mask=from_memory, other=-1)
    token = tl.where(lane == 0, remembered[:, None], token)
    length = tl.where(lane == 0, pointers[3][:, None], length)
    # Of equal lengths: the last place in the text, then the place that is followed, the memory.
    order = 4 * length + tl.where(lane == 0, 0, tl.where(lane > LONGEST, 1, 2))
    left = token >= 0
    first, first_state, place_1, length_1, left = _next_copy(
        left, token, place, length, order, lane, BUCKETS
    )
    second, state_2, place_2, length_2, left = _next_copy(
        left, token, place, length, order, lane, BUCKETS
    )
    third, state_3, place_3, length_3, left = _next_copy(
        left, token, place, length, order, lane, BUCKETS
    )
    rest = tl.where(first >= 0, first_state + 4 * BUCKETS, 0)
    states = (first_state, state_2 + 2 * BUCKETS, state_3 + 2 * BUCKETS)
    places, lengths = (place_1, place_2, place_3), (length_1, length_2, length_3)
    return (first, second, third), states, places, lengths, rest, remembered


def bucket(length: Tensor) -> Tensor:
    """The bucket of match lengths of at least 1."""
    return torch.bucketize(length, torch.tensor(LENGTHS, device=length.device), right=True) - 1


def text_places(place: Tensor, ends: Tensor, depth: Tensor | int) -> Tensor:
    """The PyTorch reference for `place_in_text`."""
    period = (ends + depth - place).clamp(min=1)
    return torch.where(place < ends, place, ends - period + depth % period)


def find_copies(
    ngrams: NgramIndex,
    memory: TextMemory,
    slots: Tensor,
    suffix: Tensor,
    pointers: Pointers,
    depth: int,
) -> Copies:
    """The PyTorch reference for the copies of W nodes of each request.

    Args:
        ngrams: The texts and their n-gram index.
        memory: The memory of finished texts.
        slots: Int64 `[B]`, the slots of the requests.
        suffix: Integers `[B, W, LONGEST]`, the last tokens of each node's path; -1 before the
            beginning of the text.
        pointers: Where the nodes' paths are followed.
        depth: The depth of the nodes.
    """
    places, known = find_matches(ngrams, slots, suffix)
    ends = ngrams.lengths[slots].long()[:, None]
    followed = text_places(pointers.own.long(), ends, depth)
    places = torch.cat((places, followed[..., None]), -1)
    on = (pointers.own_length > 0) & (followed >= 0)
    known = torch.cat((known, on[..., None]), -1)
    lengths = torch.arange(1, LONGEST + 1, device=places.device).expand(*suffix.shape[:2], -1)
    lengths = torch.cat((lengths, pointers.own_length[..., None].long()), -1)
    texts = slots[:, None, None].expand_as(places)
    tokens = ngrams.history[texts, places.clamp(min=0, max=ngrams.history.shape[1] - 1)]
    tokens = tokens.masked_fill(~known, -1)
    places = torch.cat((places[..., :-1], pointers.own[..., None].long()), -1)
    from_memory = memory.tokens[pointers.memory.long()].masked_fill(pointers.memory_length < 1, -1)
    tokens = torch.cat((tokens, from_memory[..., None]), -1)
    lengths = torch.cat((lengths, pointers.memory_length[..., None].long()), -1)
    places = torch.cat((places, torch.zeros_like(places[..., :1])), -1)
    preferred = torch.tensor([2] * LONGEST + [1, 0], device=tokens.device)
    order = (4 * lengths + preferred).masked_fill(tokens < 0, -1)
    lanes = torch.arange(tokens.shape[-1], device=tokens.device)
    found = []
    for rank in range(COPIES):
        best = order.max(-1, keepdim=True)
        token = tokens.gather(-1, best.indices).masked_fill(best.values < 0, -1)
        length = lengths.gather(-1, best.indices)
        state = 1 + bucket(length) + BUCKETS * (best.indices == len(lanes) - 1)
        state = state.masked_fill(token < 0, 0) + (2 * BUCKETS if rank else 0)
        same = (order >= 0) & (tokens == token)
        own = order.masked_fill(~same | (lanes == len(lanes) - 1), -1).max(-1, keepdim=True)
        is_own = own.values >= 0
        place = places.gather(-1, own.indices) * is_own
        found.append((token, state, place, lengths.gather(-1, own.indices) * is_own))
        order = order.masked_fill(same, -1)
    columns = [torch.cat(column, -1) for column in zip(*found, strict=True)]
    first, first_state = found[0][0][..., 0], found[0][1][..., 0]
    rest = (first_state + 4 * BUCKETS).masked_fill(first < 0, 0)
    return Copies(columns[0], columns[1], columns[2], columns[3], rest, from_memory)


def follow(
    copies: Copies, pointers: Pointers, parents: Tensor, tokens: Tensor, ring: int
) -> Pointers:
    """The PyTorch reference for where children of nodes are followed.

    Args:
        copies: The copies of the W parents.
        pointers: The pointers of the W parents.
        parents: Int64 `[B, C]`, the parent of each child.
        tokens: Int32 `[B, C]`, the children's tokens; -1 where there is no child.
        ring: Number of places of the memory's ring.
    """
    above = parents[..., None].expand(-1, -1, COPIES)
    copied, place, length = (
        each.gather(1, above) for each in (copies.tokens, copies.own, copies.own_length)
    )
    same = (copied == tokens[..., None]) & (tokens >= 0)[..., None] & (length > 0)
    own = (same * (place + 1)).sum(-1)
    own_length = (same * (length + 1)).sum(-1).clamp(max=MAX_MATCH)
    remembered = copies.memory_token.gather(1, parents)
    goes_on = (remembered == tokens) & (tokens >= 0)
    memory = (pointers.memory.gather(1, parents) + 1) % ring * goes_on
    memory_length = (pointers.memory_length.gather(1, parents) + 1).clamp(max=MAX_MATCH) * goes_on
    return Pointers(own.int(), own_length.int(), memory.int(), memory_length.int())
