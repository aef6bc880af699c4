"""The texts of running requests, and where each of their n-grams was last followed by a token.

A draft tree may go on as the text went on after its longest suffix that stood there before (the
copy of prompt lookup). Appending a token costs the same however long the text is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction

LONGEST = 6
"""Tokens of the longest n-gram that is looked for."""

_EXTEND = NativeFunction("context.cpp", "extend", "pippipipi")


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
