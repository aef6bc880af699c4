"""The texts of running requests with an index of their n-grams, for prompt-lookup decoding.

The index maps each n-gram of a text to its last occurrence, so that a draft tree can propose what
followed there. Appending a token takes constant time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl

LONGEST = 6
"""Longest n-gram that is looked up at every node, in tokens. All shorter ones are indexed too."""

AT_ROOT = 16
"""Length of the n-grams that are indexed for the lookup at the root alone (`root_matches.py`)."""

GRAMS = next_power_of_2(LONGEST + 1)
"""Lanes of a kernel for the n-grams of each length n; lane 0 has no n-gram."""

assert GRAMS == LONGEST + 2  # one lane is left, for the n-grams of `AT_ROOT` tokens

_EXTEND = CppFunction("ngrams.cpp", "extend", "pippipipi")
_PREVIOUS = CppFunction("ngrams.cpp", "previous_tokens", "pippip")
_PATH, _BLOCK = 16, 512


@dataclass(frozen=True)
class NgramIndex:
    """The texts of P slots and the indexes of their n-grams.

    Attributes:
        history: Int32 `[P, T]`, the tokens of each text.
        lengths: Int32 `[P]`, the number of tokens of each text; tokens beyond T are dropped.
        index: Int32 `[P, H]`, H a power of two: by an n-gram's hash, the place of the token that
            followed its last occurrence; 0 if there is none. N-grams may share a cell, so a match
            must be compared with the text.
    """

    history: Tensor
    lengths: Tensor
    index: Tensor

    @classmethod
    def of(cls, slots: int, length: int, cells: int, device: torch.device) -> NgramIndex:
        """An index of empty texts.

        Args:
            slots: Number of texts.
            length: Maximum number of tokens of a text.
            cells: Number of cells of each text's index, a power of two.
            device: Device of the tensors.

        Raises:
            ValueError: `cells` is not a power of two.
        """
        if cells < 1 or cells & (cells - 1):
            raise ValueError(f"cells={cells} must be a power of two")
        return cls(
            zeros((slots, length), device),
            zeros((slots,), device),
            zeros((slots, cells), device),
        )

    def clear(self, slot: int) -> None:
        """Make the text of `slot` empty."""
        self.lengths[slot].zero_()
        self.index[slot].zero_()


def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Int32 zeros; on a CPU their pages take no memory until they are written to."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)


def mix(values: Tensor, tokens: Tensor) -> Tensor:
    """Hash `tokens` into the hashes `values`; int64 in [0, 2^32)."""
    values = ((values ^ (tokens & 0xFFFFFFFF)) * 0x9E3779B1) & 0xFFFFFFFF
    return values ^ (values >> 15)


def ngram_cells(tokens: Tensor, cells: int) -> Tensor:
    """The cells of n-grams `tokens [..., n]` in an index of `cells` cells, int64 `[...]`."""
    hashed = torch.full(tokens.shape[:-1], tokens.shape[-1], device=tokens.device)
    for column in tokens.long().unbind(-1):
        hashed = mix(hashed, column)
    return hashed & (cells - 1)


@jit
def mixed(hashed: tl.tensor, token: tl.tensor) -> tl.tensor:
    """`mix` in a kernel, for uint32 hashes and int32 tokens."""
    hashed = (hashed ^ token.to(tl.uint32, bitcast=True)) * 0x9E3779B1
    return hashed ^ (hashed >> 15)


@jit
def gram_lengths(LONGEST: tl.constexpr, AT_ROOT: tl.constexpr, GRAMS: tl.constexpr) -> tl.tensor:
    """The length of the n-grams of each lane, int32 `[GRAMS]`; 0 in lane 0."""
    lane = tl.arange(0, GRAMS)
    return tl.where(lane > LONGEST, AT_ROOT, lane)


@jit(do_not_specialize=("columns", "write", "to_index"))
def _extend_kernel(
    history: tl.tensor,
    lengths: tl.tensor,
    index: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    length: tl.tensor,
    cells: tl.tensor,
    columns: tl.tensor,
    write: tl.tensor,
    to_index: tl.tensor,
    LONGEST: tl.constexpr,
    AT_ROOT: tl.constexpr,
    GRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write and index a block of new tokens; one program per request and block.

    With both `write` and `to_index` there is one block per request, and the program also sets the
    length.
    """
    slot = tl.load(slots + tl.program_id(0))
    line = tokens + tl.program_id(0).to(tl.int64) * columns
    text = history + slot * length
    lanes = tl.arange(0, BLOCK)
    start = tl.program_id(1) * BLOCK
    end = tl.load(lengths + slot)
    for earlier in range(0, start, BLOCK):
        end += tl.sum((tl.load(line + earlier + lanes) >= 0).to(tl.int32), 0)
    token = tl.load(line + start + lanes, mask=start + lanes < columns, other=-1)
    added = (token >= 0).to(tl.int32)
    place = end + tl.cumsum(added, 0) - 1
    fits = (token >= 0) & (place < length)
    if write != 0:
        tl.store(text + place, token, mask=fits)
    if write + to_index == 2:
        # The loads below read what other threads of the program have stored.
        tl.debug_barrier()
        tl.store(lengths + slot, tl.minimum(end + tl.sum(added, 0), length))
    if to_index != 0:
        n = gram_lengths(LONGEST, AT_ROOT, GRAMS)[None, :]
        hashed = n.to(tl.uint32)
        for i in tl.static_range(AT_ROOT):
            back = AT_ROOT - i
            token = tl.load(text + place - back, mask=fits & (place >= back), other=0)
            hashed = tl.where(n >= back, mixed(hashed, token[:, None]), hashed)
        whole = fits[:, None] & (n > 0) & (n <= place[:, None])
        cell = index + slot * cells + (hashed.to(tl.int64) & (cells - 1))
        # The last n-gram of a cell wins: later places are larger.
        tl.atomic_max(cell, place[:, None] + tl.zeros_like(n), mask=whole, sem="relaxed")


@jit
def match_ngrams(
    text: tl.tensor,
    index: tl.tensor,
    cells: tl.tensor,
    suffix: tl.tuple,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`find_matches` in a kernel, for W nodes of one request.

    Args:
        text: The request's text.
        index: The request's n-gram index.
        cells: Number of cells of the index.
        suffix: LONGEST columns `[W]`: the last tokens of each node's path.

    Returns:
        In lane n, the place after the last occurrence of the last n tokens, int32 `[W, GRAMS]`, and
        whether there is one.
    """
    n = tl.arange(0, GRAMS)[None, :]
    hashed = n.to(tl.uint32)
    whole = (n > 0) & (n <= LONGEST)
    for i in tl.static_range(LONGEST):
        token = suffix[i][:, None]
        hashed = tl.where(n >= LONGEST - i, mixed(hashed, token), hashed)
        whole = whole & ((token >= 0) | (n != LONGEST - i))
    place = tl.load(index + (hashed.to(tl.int64) & (cells - 1)), mask=whole, other=-1)
    same = (place >= n) & whole
    for i in tl.static_range(LONGEST):
        inside = (place >= n) & (n >= LONGEST - i)
        found = tl.load(text + place - LONGEST + i, mask=inside, other=-1)
        same = same & ((found == suffix[i][:, None]) | (n < LONGEST - i))
    return place, same


def _extend_triton(ngrams: NgramIndex, slots: Tensor, tokens: Tensor) -> None:
    history, lengths, index = ngrams.history, ngrams.lengths, ngrams.index
    requests, columns = tokens.shape
    if tokens.numel() == 0:
        return
    slots, tokens = slots.long().contiguous(), tokens.int().contiguous()
    # Two sizes, for a path and for a prompt, each of which is compiled once.
    block = _PATH if columns <= _PATH else _BLOCK
    blocks = -(-columns // block)
    # N-grams reach back into earlier blocks, so all blocks are written before any is indexed.
    launches = [(True, True)] if blocks == 1 else [(True, False), (False, True)]
    for write, to_index in launches:
        _extend_kernel[(requests, blocks)](
            history,
            lengths,
            index,
            slots,
            tokens,
            history.shape[1],
            index.shape[1],
            columns,
            int(write),
            int(to_index),
            LONGEST=LONGEST,
            AT_ROOT=AT_ROOT,
            GRAMS=GRAMS,
            BLOCK=block,
        )
    if blocks > 1:
        ends = lengths[slots] + (tokens >= 0).sum(1)
        lengths[slots] = ends.clamp(max=history.shape[1]).int()


def find_matches(ngrams: NgramIndex, slots: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
    """The PyTorch reference for the path suffixes that occur in the requests' texts.

    Args:
        ngrams: The texts and their index.
        slots: Int64 `[B]`, the slots of the requests.
        suffix: Integers `[B, W, LONGEST]`, the last tokens of each node's path; -1 before the
            beginning of the text.

    Returns:
        In column n - 1, the place after the last occurrence of the last n tokens, int64
        `[B, W, LONGEST]`, and whether there is one.
    """
    places, found = [], []
    texts = slots[:, None].expand(suffix.shape[:2])
    for n in range(1, LONGEST + 1):
        gram = suffix[..., LONGEST - n :]
        place = ngrams.index[texts, ngram_cells(gram, ngrams.index.shape[1])].long()
        previous = (place[..., None] + torch.arange(-n, 0, device=place.device)).clamp(min=0)
        same = (ngrams.history[texts[..., None], previous] == gram).all(-1)
        places.append(place)
        found.append((gram[..., 0] >= 0) & (place >= n) & same)
    return torch.stack(places, -1), torch.stack(found, -1)


def _extend_reference(ngrams: NgramIndex, slots: Tensor, tokens: Tensor) -> None:
    history, lengths, index = ngrams.history, ngrams.lengths, ngrams.index
    room, cells = history.shape[1], index.shape[1]
    added = tokens >= 0
    first = lengths[slots].long()[:, None]
    place = first + added.cumsum(1) - 1
    fits = added & (place < room)
    rows = slots[:, None].expand_as(place)
    # On a GPU, selecting by mask waits for the device; decode steps there use the Triton kernel.
    history[rows[fits], place[fits]] = tokens[fits].int()
    lengths[slots] = (first[:, 0] + added.sum(1)).clamp(max=room).int()
    for n in (*range(1, LONGEST + 1), AT_ROOT):
        whole = fits & (place >= n)
        row, end = rows[whole], place[whole]
        grams = history[row[:, None], end[:, None] + torch.arange(-n, 0, device=end.device)]
        cell = row * cells + ngram_cells(grams, cells)
        # The last n-gram of a cell wins: later places are larger.
        index.view(-1).scatter_reduce_(0, cell, end.int(), "amax")


def _extend_cpp(ngrams: NgramIndex, slots: Tensor, tokens: Tensor) -> None:
    slots, tokens = slots.long().contiguous(), tokens.int().contiguous()
    history, index = ngrams.history, ngrams.index
    _EXTEND.call(
        *(history.data_ptr(), history.shape[1], ngrams.lengths.data_ptr()),
        *(index.data_ptr(), index.shape[1], slots.data_ptr(), slots.shape[0]),
        *(tokens.data_ptr(), tokens.shape[1]),
    )


@jit
def _previous_kernel(
    history: tl.tensor, lengths: tl.tensor, slots: tl.tensor, tokens: tl.tensor, length: tl.tensor
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    place = tl.load(lengths + slot) - 2
    token = tl.load(history + slot * length + place, mask=place >= 0, other=-1)
    tl.store(tokens + request, token)


def _previous_triton(ngrams: NgramIndex, slots: Tensor) -> Tensor:
    history = ngrams.history
    count = slots.shape[0]
    tokens = torch.empty(count, dtype=torch.int32, device=history.device)
    if count:
        _previous_kernel[(count,)](history, ngrams.lengths, slots, tokens, history.shape[1])
    return tokens


def _previous_reference(ngrams: NgramIndex, slots: Tensor) -> Tensor:
    places = ngrams.lengths[slots].long() - 2
    return ngrams.history[slots, places.clamp(min=0)].masked_fill(places < 0, -1)


def _previous_cpp(ngrams: NgramIndex, slots: Tensor) -> Tensor:
    history = ngrams.history
    slots = slots.long().contiguous()
    tokens = torch.empty(slots.shape[0], dtype=torch.int32)
    _PREVIOUS.call(
        *(history.data_ptr(), history.shape[1], ngrams.lengths.data_ptr()),
        *(slots.data_ptr(), slots.shape[0], tokens.data_ptr()),
    )
    return tokens


_EXTEND_NGRAMS = Op(
    "ngrams.extend_ngrams",
    _extend_reference,
    triton=_extend_triton,
    cpp=_extend_cpp,
    needs=_EXTEND,
)
_PREVIOUS_TOKENS = Op(
    "ngrams.previous_tokens",
    _previous_reference,
    triton=_previous_triton,
    cpp=_previous_cpp,
    needs=_PREVIOUS,
)


def extend_ngrams(ngrams: NgramIndex, slots: Tensor, tokens: Tensor) -> None:
    """Append tokens to texts and index their n-grams, in place.

    Args:
        ngrams: The texts and their index.
        slots: Int64 `[B]`, the slots of the texts, without duplicates.
        tokens: Int32 `[B, E]`, the tokens to append; -1 entries are skipped.

    Raises:
        ValueError: Shapes do not fit.
    """
    if tokens.dim() != 2 or slots.shape != tokens.shape[:1]:
        raise ValueError(f"slots {[*slots.shape]} do not fit tokens {[*tokens.shape]}")
    _EXTEND_NGRAMS.on(ngrams.history)(ngrams, slots, tokens)


def previous_tokens(ngrams: NgramIndex, slots: Tensor) -> Tensor:
    """The token before the last one of each text.

    Args:
        ngrams: The texts.
        slots: Int64 `[B]`, the slots of the texts.

    Returns:
        Int32 `[B]`; -1 for a text of fewer than two tokens.
    """
    return _PREVIOUS_TOKENS.on(ngrams.history)(ngrams, slots)
