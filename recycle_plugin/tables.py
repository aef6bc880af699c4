"""The tables that Token Recycling learns: likely next tokens after one token, and after two.

Row t of the adjacency matrix holds the target's k most likely next tokens the last time token t was
verified (arXiv 2408.08696, section 3.2). The bigram table holds the same by the last two tokens. It
is a hash table of fixed size without probing: a bigram overwrites another with the same hash.

Where several requests decode together, each also has a table of its own, which comes first: what
another request's rejected drafts overwrote in the shared tables is still there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from tree_kernels.adjacency import recycle, top_candidates
from tree_kernels.bigrams import update_bigrams
from tree_kernels.candidates import ALONE, CandidateTables
from tree_kernels.memory import TextMemory, remember
from tree_kernels.ngrams import NgramIndex, zeros
from tree_kernels.source_stats import SourceStats

from recycle_plugin.priors import expected_priors

if TYPE_CHECKING:
    from drafttree.drafter import PrimeForward
    from recycle_plugin.storage.priming import Priming
    from recycle_plugin.storage.table_files import TableSaver

EMPTY = -1

BIGRAM_CELLS = 1 << 16
"""Cells of the shared bigram table."""
OWN_CELLS = 1 << 12
"""Most cells of each request's own table."""
OWN_BYTES = 1 << 26
"""Most bytes of all requests' own tables."""


class Tables:
    """The tables of an engine.

    Args:
        vocab_size: Width of the target's logits, V.
        k: Candidates kept for each token.
        device: Device of the tables.
        bigrams: Whether to keep a bigram table.
        hot_start: Whether to keep what was learned when no request is running.
        memory: Tokens of finished texts to remember.

    Attributes:
        matrix: Adjacency matrix, `int32 [V, k]`, most likely candidates first; -1 in unknown rows.
        bigrams: Bigram table, `int32 [S, 2 + k]`: two tokens and their candidates; -1 in free
            cells. S is 1 if no bigrams are kept.
        own: The requests' own tables, `int32 [P, C, 2 + k]`, of bigrams and of single tokens; one
            table of a free cell if there are none.
        memory: The memory of finished texts.
        source_stats: Acceptance statistics by candidate source.
        hot_start: Whether what was learned is kept when no request is running.
        priming: The rows that the matrix starts with, or None.
        saver: Background writer of the hot start file, or None.

    Raises:
        ValueError: The vocabulary has fewer than `k` tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        k: int,
        device: torch.device,
        *,
        bigrams: bool,
        hot_start: bool,
        memory: int = 0,
    ) -> None:
        if vocab_size < k:
            raise ValueError(
                f"k={k} candidates do not fit a vocabulary of {vocab_size}: lower k, with "
                "tree='static'"
            )
        self.matrix = torch.full((vocab_size, k), EMPTY, dtype=torch.int32, device=device)
        shape = BIGRAM_CELLS if bigrams else 1, 2 + k
        self.bigrams = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
        self._no_table = torch.full((1, 1, 2 + k), EMPTY, dtype=torch.int32, device=device)
        self.own = self._no_table
        self.memory = TextMemory.of(memory, device)
        self._bigrams = bigrams
        self._private = False
        self._batched = False
        self.source_stats = SourceStats.of(expected_priors().to(device))
        self.hot_start = hot_start
        self.priming: Priming | None = None
        self.saver: TableSaver | None = None
        self._running: set[int] = set()
        self._remembered: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the tables and the memory, the requests' own tables left out."""
        memory = self.memory.tokens.nbytes + self.memory.index.nbytes
        return self.matrix.nbytes + self.bigrams.nbytes + memory

    def allocate_own(self, slots: int, *, private: bool) -> None:
        """Give each of `slots` slots its own table.

        Args:
            slots: Number of slots.
            private: Whether the shared tables learn nothing, so that requests share nothing.
        """
        self._private = private
        if private or slots > 1:
            # Each slot's table is cleared when a request begins there.
            columns = self.bigrams.shape[1]
            share = OWN_BYTES // (slots * columns * self.bigrams.itemsize)
            cells = min(OWN_CELLS, 1 << max(share.bit_length() - 1, 0))
            self.own = zeros((slots, cells, columns), self.matrix.device)

    def begin(self, slot: int) -> None:
        """Register a request; without hot start, the first after an idle time resets the tables."""
        if not self._private and not self.hot_start and not self._running:
            self._clear()
        if self.own is not self._no_table:
            self.own[slot] = EMPTY
        self._running.add(slot)
        self._remembered.add(slot)

    def remember(self, texts: torch.Tensor) -> int:
        """Append texts to the memory.

        Args:
            texts: Int32 `[n]` on the CPU, separated by -1. They also end at tokens that the target
                does not have, as a tokenizer may have more.

        Returns:
            Number of tokens that were appended.
        """
        known = texts.masked_fill(texts >= len(self.matrix), EMPTY)
        remember(self.memory, known)
        return int((known >= 0).sum())

    def is_remembered(self, slot: int) -> bool:
        """Whether a request is registered in a slot and no reset has come since it began."""
        return slot in self._remembered

    @property
    def remembered(self) -> list[int]:
        """The slots of which that is so."""
        return sorted(self._remembered)

    def end(self, slots: Sequence[int]) -> None:
        """Unregister finished requests."""
        self._running.difference_update(slots)
        self._remembered.difference_update(slots)

    def reset(self) -> None:
        """Forget what was learned; the target's weights may have changed.

        Requests that are running stay registered, but are not remembered when they end. Primed rows
        stay, but no further ones are written to the cache; those of a model that may differ from
        its files are dropped. The hot start file is saved soon.
        """
        if self.priming is not None:
            self.priming.stop_saving()
        self._clear()
        self._remembered.clear()
        if self.own is not self._no_table:
            # The tables of other slots are cleared when requests begin there.
            for slot in self._running:
                self.own[slot] = EMPTY
        if self.saver is not None:
            self.saver.touch_emptied()

    def close(self) -> None:
        """Save what is not saved yet, and give the hot start file up."""
        if self.saver is not None:
            self.saver.close()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A context after which the tables and their files are as before; see `Drafter`."""
        stats = self.source_stats
        tables = [self.matrix, self.bigrams, stats.tried, stats.hit, stats.priors]
        tables += [self.memory.tokens, self.memory.index, self.memory.end]
        before = [each.clone() for each in tables]
        saver, priming, self.saver, self.priming = self.saver, self.priming, None, None
        try:
            yield
        finally:
            for each, known in zip(tables, before, strict=True):
                each.copy_(known)
            self.saver, self.priming = saver, priming

    def _clear(self) -> None:
        """Empty all that requests share, except for primed rows."""
        self.matrix.fill_(EMPTY)
        self.fill_unknown()
        self.bigrams.fill_(EMPTY)
        self.memory.clear()
        self.source_stats.reset()

    def prime(self, forward: PrimeForward, max_tokens: int, *, idle: bool) -> tuple[int, int]:
        """Compute rows of the primed matrix; see `ModelFreeDrafter.prime`."""
        if self.priming is None:
            return 0, 0
        compute = self.priming.when_idle if idle else self.priming.at_start
        self.fill_unknown(compute(forward, max_tokens).long().to(self.matrix.device))
        return self.priming.progress

    def fill_unknown(self, tokens: torch.Tensor | slice = slice(None)) -> None:
        """Copy primed rows into rows that are still unknown.

        Args:
            tokens: Tokens of the rows; by default all.
        """
        if self.priming is not None:
            rows = self.matrix[tokens]
            primed = self.priming.matrix[tokens]
            self.matrix[tokens] = torch.where(rows[:, :1] == EMPTY, primed, rows)

    def candidates(self, ngrams: NgramIndex, batch_size: int) -> CandidateTables:
        """What the candidates of a step of `batch_size` requests are looked up in.

        A request that decodes alone finds its own rows in the shared tables. They and its own
        table are then written by the same forwards, so its own table is left out.
        """
        self._batched = batch_size > 1
        own = self.own if self._batched or self._private else self._no_table
        return CandidateTables(
            self.matrix, self.bigrams, own, ngrams, self.memory, self.source_stats.priors
        )

    def learn(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        previous: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Write the top k of the logits into the matrix row and the bigram cell of each token.

        Args:
            slots: Slot of each row's request, `int64 [R]`.
            tokens: Token that each row of logits follows, `int32 [R]`; -1 skips the row. If a token
                occurs several times, its last row is written.
            previous: Token before each of `tokens`, `int32 [R]`; -1 if unknown.
            logits: Raw logits of the target, `[R, V]`.

        Returns:
            The most likely next token of each row, `int32 [R]`.
        """
        if self._private:
            candidates = top_candidates(logits, self.matrix.shape[1])
        else:
            candidates = recycle(self.matrix, tokens, logits)
            if self._bigrams:
                update_bigrams(self.bigrams[None], slots, tokens, previous, candidates)
        if self._private or self._batched:
            alone = torch.full_like(tokens, ALONE)
            update_bigrams(self.own, slots, tokens, alone, candidates)
            update_bigrams(self.own, slots, tokens, previous, candidates)
        self.changed()
        return candidates[:, 0]

    def changed(self) -> None:
        """Record that there is something new to save to the hot start file."""
        if self.saver is not None:
            self.saver.touch()
