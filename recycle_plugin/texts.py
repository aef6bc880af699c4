"""The texts of running requests, in bounded memory.

An engine for many requests of long contexts would need gigabytes for their texts. So each request
gets an equal share of a fixed amount. Where that is less than the context, only the end of a longer
text is kept: nothing is copied from what came before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tree_kernels.ngrams import LONGEST, NgramIndex, extend_ngrams, zeros

from drafttree.transfer import AsyncHostCopy, on_device

MAX_BYTES = 1 << 27
"""Most bytes of all texts and their indices."""

ITEM = 4
"""Bytes of a token and of a cell."""


def cells_of(slots: int, max_model_len: int) -> int:
    """Number of cells of each text's index: one for each of its n-grams, if there is room."""
    share = MAX_BYTES // (ITEM * slots)
    half = 1 << max((share // 2).bit_length() - 1, 0)
    return min(half, 1 << ((LONGEST + 1) * max_model_len - 1).bit_length())


class Texts:
    """The end of each running request's text.

    Args:
        slots: Number of requests.
        max_model_len: Greatest number of tokens of a request.
        device: Device of the texts.

    Attributes:
        ngrams: The texts and the index of their n-grams.
        starts: By slot, the number of tokens that the text had when its request started, less
            those that were dropped since, `int32 [slots]`.
        room: Most tokens of a text.
    """

    def __init__(self, slots: int, max_model_len: int, device: torch.device) -> None:
        cells = cells_of(slots, max_model_len)
        self.room = max(min(max_model_len, MAX_BYTES // (ITEM * slots) - cells), 1)
        self.ngrams = NgramIndex.of(slots, self.room, cells, device)
        self.starts = zeros((slots,), device)
        self._is_whole = self.room == max_model_len
        # Lengths are known on the device alone. Texts are shortened whenever so many tokens may
        # have been appended, for which there is always room, by lengths that were copied before.
        self._margin = max(self.room // 8, 1)
        self._appended = 0
        self._known: AsyncHostCopy | None = None
        # How much had been appended when the copy was made, and the texts that began after it.
        self._known_after = 0
        self._began: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the texts and their indices."""
        return self.ngrams.history.nbytes + self.ngrams.index.nbytes

    def start(self, slot: int, text: Sequence[int]) -> None:
        """Begin a text."""
        if not self._is_whole:
            text = text[-(self.room - self._margin) :]
            self._began[slot] = len(text)
        self.ngrams.clear(slot)
        # Assigned to one element, a number would be copied from the host, which would wait for it.
        self.starts[slot].fill_(len(text))
        self._append(slot, on_device(np.array(text, np.int32), self.starts.device))

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append `tokens` (`int32 [B, E]`, padded with -1) to texts."""
        if self._is_whole:
            extend_ngrams(self.ngrams, slots, tokens)
            return
        for first in range(0, tokens.shape[1], self._margin):
            part = tokens[:, first : first + self._margin]
            if self._appended + part.shape[1] > self._margin:
                self._shorten_long()
            self._appended += part.shape[1]
            extend_ngrams(self.ngrams, slots, part)
            if self._known is None and 2 * self._appended >= self._margin:
                self._note_lengths()

    def _append(self, slot: int, tokens: torch.Tensor) -> None:
        extend_ngrams(self.ngrams, on_device(np.array([slot]), self.starts.device), tokens[None])

    def _note_lengths(self) -> AsyncHostCopy:
        self._known, self._known_after = AsyncHostCopy.of(self.ngrams.lengths), self._appended
        self._began.clear()
        return self._known

    def _shorten_long(self) -> None:
        """Drop the older part of texts that may soon be too long."""
        lengths = (self._known or self._note_lengths()).wait().tolist()
        for slot, length in self._began.items():
            lengths[slot] = length
        most = self.room - self._margin - (self._appended - self._known_after)
        for slot, length in enumerate(lengths):
            if length > most:
                self._shorten(slot)
        self._known, self._appended = None, 0

    def _shorten(self, slot: int) -> None:
        """Keep the end of a text, half of the room."""
        length, kept = self.ngrams.lengths[slot].clone(), self.room // 2
        dropped = (length - kept).clamp(min=0)
        places = dropped + torch.arange(kept, device=length.device)
        text = self.ngrams.history[slot, places].masked_fill(places >= length, -1)
        self.ngrams.clear(slot)
        self._append(slot, text)
        self.starts[slot] = (self.starts[slot] - dropped).clamp(min=0)
