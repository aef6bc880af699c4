"""A memory of finished texts, shared by all requests, with an index of its n-grams.

The texts stand one after another in a ring of tokens, so the oldest leaves first. Drafts copy what
followed the longest text in it that ends as a request's own text does, as in SuffixDecoding (arXiv
2411.04975); a hash index and a comparison with the text take the place of a suffix tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.ngrams import mixed, ngram_cells, zeros

MEMORY_NGRAMS = (4, 8, 16)
"""Lengths of the n-grams that are indexed. Matches of fewer tokens mislead more than they help."""

_APPEND = CppFunction("memory.cpp", "append", "pippippiippi")
_BLOCK = 512
_WRAP = (1 << 31) - 1  # positions are counted modulo 2^31
_LANES = next_power_of_2(len(MEMORY_NGRAMS))


@dataclass(frozen=True)
class TextMemory:
    """Texts in a ring of R tokens and the index of their n-grams.

    Positions are counted from the first token that was ever appended, modulo 2^31; position p is at
    place p mod R of the ring.

    Attributes:
        tokens: Int32 `[R]`, R a power of two: the ring. -1 after each text and in free places.
        index: Int32 `[3, C]`, C a power of two: by an n-gram's hash, for each n of
            `MEMORY_NGRAMS`, the position of the token that followed its last occurrence; 0 if there
            is none. A place may have been overwritten since, and n-grams may share a cell, so a
            match must be compared with the text.
        end: Int32 `[1]`, the position of the next token.
    """

    tokens: Tensor
    index: Tensor
    end: Tensor

    @classmethod
    def of(cls, capacity: int, device: torch.device) -> TextMemory:
        """An empty memory.

        Args:
            capacity: Number of tokens R, rounded up to a power of two. A memory of 0 tokens stays
                empty.
            device: Device of the tensors.
        """
        places = next_power_of_2(capacity)
        return cls(
            torch.full((places,), -1, dtype=torch.int32, device=device),
            zeros((len(MEMORY_NGRAMS), 2 * places if capacity else 1), device),
            zeros((1,), device),
        )

    @property
    def capacity(self) -> int:
        """Number of tokens, 0 if nothing is kept."""
        return 0 if self.index.shape[1] == 1 else len(self.tokens)

    def clear(self) -> None:
        """Forget all texts."""
        self.tokens.fill_(-1)
        self.index.zero_()
        self.end.zero_()

    def text(self) -> Tensor:
        """All texts, oldest first, each followed by -1: int32 `[n]` on the CPU. Waits for a GPU."""
        end = int(self.end)
        ring = self.tokens.cpu().roll(-(end % len(self.tokens)))
        # Free places come first, and may look like empty texts.
        known = (ring >= 0).nonzero()
        return ring[int(known[0]) :] if len(known) else ring[:0]


@jit(do_not_specialize=["requests"])
def _append_kernel(
    memory: tl.tensor,
    index: tl.tensor,
    ends: tl.tensor,
    history: tl.tensor,
    lengths: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    requests: tl.tensor,
    context: tl.tensor,
    length: tl.tensor,
    places: tl.tensor,
    cells: tl.tensor,
    SHORTEST: tl.constexpr,
    NGRAMS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    WRAP: tl.constexpr,
) -> None:
    """Append the texts one after another, block by block, in a single program.

    The length of the next text's place in the ring depends on that of the text before, and a later
    n-gram replaces an earlier one.
    """
    end = tl.load(ends)
    lanes = tl.arange(0, BLOCK)
    gram = tl.arange(0, LANES)[None, :]
    n = SHORTEST << gram
    LONGEST: tl.constexpr = SHORTEST << (NGRAMS - 1)
    for request in range(requests):
        slot = tl.load(slots + request)
        text = history + slot * length
        last = tl.load(lengths + slot)
        start = tl.load(starts + slot)
        # A text that is longer than the ring leaves its end there.
        first = tl.maximum(tl.maximum(start - context, 0), last - places + 1)
        first = tl.where(start < last, first, last)
        for block in range(first, last, BLOCK):
            at = block + lanes
            inside = at < last
            position = (end + at - first) & WRAP
            token = tl.load(text + at, mask=inside, other=-1)
            tl.store(memory + (position & (places - 1)), token, mask=inside)
            hashed = n.to(tl.uint32) + tl.zeros([BLOCK, LANES], tl.uint32)
            for i in tl.static_range(LONGEST):
                back = LONGEST - i
                earlier = tl.load(text + at - back, mask=inside & (at - back >= first), other=0)
                hashed = tl.where(n >= back, mixed(hashed, earlier[:, None]), hashed)
            whole = inside[:, None] & (gram < NGRAMS) & ((at - first)[:, None] >= n)
            cell = index + gram * cells + (hashed.to(tl.int64) & (cells - 1))
            # The last n-gram of a cell wins. What the cells held before may be a higher position,
            # from before the count began again.
            tl.store(cell, 0, mask=whole)
            tl.debug_barrier()
            value = position[:, None] + tl.zeros_like(n)
            tl.atomic_max(cell, value, mask=whole, sem="relaxed")
            tl.debug_barrier()
        written = tl.maximum(last - first, 0)
        gap = (end + written) & WRAP
        tl.store(memory + (gap & (places - 1)), -1, mask=written > 0)
        end = (end + written + (written > 0).to(tl.int32)) & WRAP
    tl.store(ends, end)


def _append_triton(
    memory: TextMemory,
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    starts: Tensor,
    context: int,
) -> None:
    _append_kernel[(1,)](
        memory.tokens,
        memory.index,
        memory.end,
        history,
        lengths,
        slots,
        starts,
        len(slots),
        context,
        history.shape[1],
        len(memory.tokens),
        memory.index.shape[1],
        SHORTEST=MEMORY_NGRAMS[0],
        NGRAMS=len(MEMORY_NGRAMS),
        LANES=_LANES,
        BLOCK=min(_BLOCK, max(16, next_power_of_2(history.shape[1]))),
        WRAP=_WRAP,
        num_warps=8,
    )


def _append_reference(
    memory: TextMemory,
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    starts: Tensor,
    context: int,
) -> None:
    places, cells = len(memory.tokens), memory.index.shape[1]
    for slot in slots.tolist():
        last, start = int(lengths[slot]), int(starts[slot])
        if start >= last:
            continue
        text = history[slot, max(start - context, 0, last - places + 1) : last]
        end = int(memory.end)
        count = torch.arange(len(text) + 1, device=text.device)
        position = (end + count) & _WRAP
        memory.tokens[position % places] = torch.cat((text, text.new_tensor([-1])))
        for row, n in zip(memory.index, MEMORY_NGRAMS, strict=True):
            if len(text) > n:
                cell = ngram_cells(text[:-1].unfold(0, n, 1), cells)
                # Duplicates: the last one wins.
                row[cell] = 0
                row.scatter_reduce_(0, cell, position[n:-1].int(), "amax")
        memory.end.fill_((end + len(text) + 1) & _WRAP)


def _append_cpp(
    memory: TextMemory,
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    starts: Tensor,
    context: int,
) -> None:
    _APPEND.call(
        *(memory.tokens.data_ptr(), len(memory.tokens)),
        *(memory.index.data_ptr(), memory.end.data_ptr(), memory.index.shape[1]),
        *(history.data_ptr(), lengths.data_ptr(), history.shape[1]),
        *(len(slots), slots.data_ptr(), starts.data_ptr(), context),
    )


_APPEND_TEXTS = Op(
    "memory.append_texts",
    _append_reference,
    triton=_append_triton,
    cpp=_append_cpp,
    needs=_APPEND,
)


def append_texts(
    memory: TextMemory,
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    starts: Tensor,
    context: int = 0,
) -> None:
    """Append texts to the memory, in place and in the order of `slots`.

    Args:
        memory: The memory.
        history: Int32 `[P, T]`, the tokens of each slot's text.
        lengths: Int32 `[P]`, the number of tokens of each text.
        slots: Int64 `[B]`, the slots of the texts to append.
        starts: Int32 `[P]`, the first token of each text to append. Nothing is appended of a text
            that is not longer.
        context: Number of tokens before `starts` to append with them.

    Raises:
        ValueError: Shapes do not fit.
    """
    shape = history.shape[:1]
    if history.dim() != 2 or lengths.shape != shape or starts.shape != shape or slots.dim() != 1:
        shapes = [[*each.shape] for each in (history, lengths, slots, starts)]
        raise ValueError(f"expected [P, T], [P], [B] and [P], not {shapes}")
    if memory.capacity and len(slots):
        run = _APPEND_TEXTS.on(memory.tokens)
        run(memory, history.contiguous(), lengths, slots.long().contiguous(), starts, context)


def remember(memory: TextMemory, tokens: Tensor) -> None:
    """Append one text of any length, or several that are separated by -1, on any device.

    Args:
        memory: The memory.
        tokens: Int32 `[n]`; only as much of its end as the memory has room for is appended.
    """
    device = memory.tokens.device
    tokens = tokens[-len(memory.tokens) :].to(device, torch.int32)
    length = torch.full((1,), len(tokens), dtype=torch.int32, device=device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    append_texts(memory, tokens[None], length, slot, zeros((1,), device))
