"""The texts of running requests, and where each of their n-grams was last followed by a token.

A draft tree may go on as the text went on after its longest suffix that stood there before (the
copy of prompt lookup). Appending a token costs the same however long the text is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, tl, use_triton

LONGEST = 6
"""Tokens of the longest n-gram that is looked for."""

GRAMS = next_power_of_2(LONGEST + 1)
"""Lanes for n-grams of each length in a kernel; lane 0 is for none."""

_EXTEND = NativeFunction("context.cpp", "extend", "pippipipi")
_LAST_BUT_ONE = NativeFunction("context.cpp", "last_but_one", "pippip")
_BLOCK = 512


@dataclass(frozen=True)
class Contexts:
    """Texts by slots.

    Attributes:
        history: `int32 [P, T]`.
        lengths: `int32 [P]`, the tokens of each text; what comes after T of them is left out.
        index: `int32 [P, H]`, H a power of two: where the token stands that came after an n-gram,
            the last time; by the n-gram's hash, so it may be another's. -1 where there is none.
    """

    history: Tensor
    lengths: Tensor
    index: Tensor

    @classmethod
    def of(cls, slots: int, length: int, cells: int, device: torch.device) -> Contexts:
        """Empty texts of at most `length` tokens, each with an index of `cells`.

        Raises:
            ValueError: `cells` is no power of two.
        """
        if cells < 1 or cells & (cells - 1):
            raise ValueError(f"cells={cells} is no power of two")
        return cls(
            torch.zeros(slots, length, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.full((slots, cells), -1, dtype=torch.int32, device=device),
        )

    def clear(self, slot: int) -> None:
        """Begin a text anew."""
        self.lengths[slot] = 0
        self.index[slot].fill_(-1)


def mix(values: Tensor, tokens: Tensor) -> Tensor:
    """One step of the hash of all tables: int64 in [0, 2^32) both ways."""
    values = ((values ^ (tokens & 0xFFFFFFFF)) * 0x9E3779B1) & 0xFFFFFFFF
    return values ^ (values >> 15)


def ngram_cells(tokens: Tensor, cells: int) -> Tensor:
    """Where n-grams stand in an index, int64 `[...]`; tokens: integers `[..., n]`."""
    hashed = torch.full(tokens.shape[:-1], tokens.shape[-1], device=tokens.device)
    for column in tokens.long().unbind(-1):
        hashed = mix(hashed, column)
    return hashed & (cells - 1)


@jit
def mixed(hashed: tl.tensor, token: tl.tensor) -> tl.tensor:
    """`mix` in a kernel: of uint32 hashes and int32 tokens."""
    hashed = (hashed ^ token.to(tl.uint32, bitcast=True)) * 0x9E3779B1
    return hashed ^ (hashed >> 15)


@jit
def _extend_kernel(
    history: tl.tensor,
    lengths: tl.tensor,
    index: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    length: tl.tensor,
    cells: tl.tensor,
    columns: tl.tensor,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
    INDEX: tl.constexpr,
) -> None:
    """One program a request and block of columns; it ends the text if it does all its work."""
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
    if WRITE:
        tl.store(text + place, token, mask=fits)
    if WRITE and INDEX:
        # What other threads of the program wrote is read below.
        tl.debug_barrier()
        tl.store(lengths + slot, tl.minimum(end + tl.sum(added, 0), length))
    if INDEX:
        n = tl.arange(0, GRAMS)[None, :]
        hashed = n.to(tl.uint32)
        for i in tl.static_range(LONGEST):
            back = LONGEST - i
            token = tl.load(text + place - back, mask=fits & (place >= back), other=0)
            hashed = tl.where(n >= back, mixed(hashed, token[:, None]), hashed)
        whole = fits[:, None] & (n > 0) & (n <= LONGEST) & (n <= place[:, None])
        cell = index + slot * cells + (hashed.to(tl.int64) & (cells - 1))
        # Of equal cells the last stays: later places are larger.
        tl.atomic_max(cell, place[:, None] + tl.zeros_like(n), mask=whole, sem="relaxed")


@jit
def find_copies(
    text: tl.tensor,
    index: tl.tensor,
    cells: tl.tensor,
    suffix: tl.tuple,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`copies` in a kernel: of one request's text and index, and a tuple of suffix columns [W]."""
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
        stood = tl.load(text + place - LONGEST + i, mask=inside, other=-1)
        same = same & ((stood == suffix[i][:, None]) | (n < LONGEST - i))
    matched = tl.max(tl.where(same, n, 0), 1)
    place = tl.sum(tl.where(same & (n == matched[:, None]), place, 0), 1)
    return tl.load(text + place, mask=matched > 0, other=-1), matched


def _extend_triton(contexts: Contexts, slots: Tensor, tokens: Tensor) -> None:
    history, lengths, index = contexts.history, contexts.lengths, contexts.index
    requests, columns = tokens.shape
    if tokens.numel() == 0:
        return
    slots, tokens = slots.long().contiguous(), tokens.int().contiguous()
    block = min(_BLOCK, max(16, next_power_of_2(columns)))
    blocks = -(-columns // block)
    # N-grams reach back into earlier blocks, so they wait for all that is written.
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
            LONGEST=LONGEST,
            GRAMS=GRAMS,
            BLOCK=block,
            WRITE=write,
            INDEX=to_index,
        )
    if blocks > 1:
        ends = lengths[slots] + (tokens >= 0).sum(1)
        lengths[slots] = ends.clamp(max=history.shape[1]).int()


def copies(contexts: Contexts, slots: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens after the longest suffixes that stood in the texts before, -1 for none, and the
    suffixes' lengths, 0 for none: int32 `[B, W]` both. On a CPU.

    slots: int64 [B]; suffix: integers [B, W, LONGEST], -1 before a text's beginning.
    """
    token = torch.full(suffix.shape[:2], -1, dtype=torch.int32)
    matched = torch.zeros_like(token)
    texts = slots[:, None].expand(suffix.shape[:2])
    for n in range(LONGEST, 0, -1):
        gram = suffix[..., LONGEST - n :]
        cell = ngram_cells(gram, contexts.index.shape[1])
        place = contexts.index[texts, cell].long()
        before = (place[..., None] + torch.arange(-n, 0)).clamp(min=0)
        same = (contexts.history[texts[..., None], before] == gram).all(-1)
        found = (matched == 0) & (gram[..., 0] >= 0) & (place >= n) & same
        token = torch.where(found, contexts.history[texts, place.clamp(min=0)], token)
        matched = torch.where(found, n, matched)
    return token, matched


def _extend_reference(contexts: Contexts, slots: Tensor, tokens: Tensor) -> None:
    history, lengths, index = contexts.history, contexts.lengths, contexts.index
    room, cells = history.shape[1], index.shape[1]
    added = tokens >= 0
    first = lengths[slots].long()[:, None]
    place = first + added.cumsum(1) - 1
    fits = added & (place < room)
    rows = slots[:, None].expand_as(place)
    # The selections are free of syncs because the reference runs on the CPU.
    history[rows[fits], place[fits]] = tokens[fits].int()
    lengths[slots] = torch.minimum((first[:, 0] + added.sum(1)), torch.tensor(room)).int()
    for n in range(1, LONGEST + 1):
        whole = fits & (place >= n)
        row, end = rows[whole], place[whole]
        grams = history[row[:, None], end[:, None] + torch.arange(-n, 0)]
        cell = row * cells + ngram_cells(grams, cells)
        # Of equal cells the last stays: later places are larger.
        index.view(-1).scatter_reduce_(0, cell, end.int(), "amax")


def extend_contexts(contexts: Contexts, slots: Tensor, tokens: Tensor) -> None:
    """Append tokens to texts, in place.

    slots: int64 [B], each at most once; tokens: int32 [B, E], -1 for none. Raises ValueError on
    shapes that do not fit.
    """
    if tokens.dim() != 2 or slots.shape != tokens.shape[:1]:
        raise ValueError(f"slots {[*slots.shape]} do not fit tokens {[*tokens.shape]}")
    if use_triton(contexts.history):
        _extend_triton(contexts, slots, tokens)
        return
    extend = _EXTEND.on(contexts.history)
    if extend is None:
        _extend_reference(contexts, slots, tokens)
        return
    slots, tokens = slots.long().contiguous(), tokens.int().contiguous()
    history, index = contexts.history, contexts.index
    extend(
        *(history.data_ptr(), history.shape[1], contexts.lengths.data_ptr()),
        *(index.data_ptr(), index.shape[1], slots.data_ptr(), len(slots)),
        *(tokens.data_ptr(), tokens.shape[1]),
    )


def last_but_one(contexts: Contexts, slots: Tensor) -> Tensor:
    """The token before each text's last, int32 `[B]`; -1 where there is none. slots: int64 [B]."""
    history, lengths = contexts.history, contexts.lengths
    read = _LAST_BUT_ONE.on(history)
    if read is None:
        places = lengths[slots].long() - 2
        return history[slots, places.clamp(min=0)].masked_fill(places < 0, -1)
    slots = slots.long().contiguous()
    tokens = torch.empty(len(slots), dtype=torch.int32)
    read(
        *(history.data_ptr(), history.shape[1], lengths.data_ptr()),
        *(slots.data_ptr(), len(slots), tokens.data_ptr()),
    )
    return tokens
