"""Priming: rows of the adjacency matrix that are computed before any text has shown their token.

Row t gets the target's k most likely tokens after `[BOS, t]`, or after `[t]` if the target has no
BOS. The paper (arXiv 2408.08696) starts from zeros instead and learns the row of a token when it is
first verified. The rows are computed by forwards of the served target itself: for a moment when the
engine starts, and then while it has no request. They are kept in the user's cache.

Rows are computed by ascending token id. Vocabularies of BPE number their tokens in the order of the
merges, the most frequent first: in SmolLM2's the first 1,000 of 49,152 ids are 49 to 63% of the
tokens of English text and of code, and the first 4,000 are 68 to 80%. With the tokens of a shipped
text first, fewer were.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch
from tree_kernels.adjacency import top_candidates

from drafttree.drafter import PrimeForward
from recycle_plugin.storage.primed_files import EMPTY, PrimedFile

IDLE_SECONDS = 0.05
"""Aim for the duration of a forward while the engine is idle; a request may wait for its end."""

MIN_TOKENS = 8
"""Tokens of a forward, even if it takes longer. With fewer, nearly all of the time is spent on
reading the weights."""

_SAVE_SECONDS = 30.0  # of computation
_LOG_SECONDS = 60.0


class Priming:
    """The primed matrix of a served model, row by row as it is computed.

    Attributes:
        matrix: `int32 [V, k]`; -1 in rows that are not computed yet.
    """

    def __init__(
        self,
        vocab_size: int,
        k: int,
        device: torch.device,
        *,
        bos: int | None,
        seconds: float,
        file: PrimedFile,
        logger: logging.Logger,
    ) -> None:
        """Load the rows that are in the cache.

        Args:
            vocab_size: Width of the target's logits, V.
            k: Candidates per token.
            device: Device of the matrix.
            bos: The token before each token; None for none.
            seconds: How long to compute when the engine starts.
            file: The cache file.
            logger: Logger for progress.
        """
        loaded = file.load(vocab_size)
        if loaded is None:
            loaded = torch.full((vocab_size, k), EMPTY, dtype=torch.int32)
        self._left = (loaded[:, 0] == EMPTY).nonzero()[:, 0].int()
        self.matrix = loaded.to(device)
        self._bos = bos
        self._seconds = seconds
        self._file = file
        self._logger = logger
        self._failed = False
        self._size = MIN_TOKENS
        self._unsaved = 0.0
        self._unlogged = 0.0
        if not len(self._left):
            logger.info("Token Recycling is primed from %s", file.path)

    @property
    def progress(self) -> tuple[int, int]:
        """Number of rows that are computed, and of all rows that will be."""
        done = len(self.matrix) - len(self._left)
        return done, done if self._failed else len(self.matrix)

    @property
    def _unfinished(self) -> bool:
        done, rows = self.progress
        return done < rows

    def at_start(self, forward: PrimeForward, max_tokens: int) -> torch.Tensor:
        """Compute rows until the time is up; returns their tokens, `int32 [n]`.

        Args:
            forward: Runs the target.
            max_tokens: Greatest number of tokens of one forward.
        """
        left, started = self._left, perf_counter()
        took = 0.0
        # A forward that would end too late is not started.
        while self._unfinished and perf_counter() - started + took < self._seconds:
            took = self._compute(forward, max_tokens)
        done = left[: len(left) - len(self._left)]
        if len(done):
            self._file.save(self.matrix)
            self._log(perf_counter() - started)
        return done

    def when_idle(self, forward: PrimeForward, max_tokens: int) -> torch.Tensor:
        """Compute a few rows in one short forward; returns their tokens, `int32 [n]`."""
        left, size = self._left, min(self._size, max_tokens)
        if not self._unfinished:
            return left[:0]
        took = self._compute(forward, size)
        # At most twice the size, as the time of so many more tokens is not known.
        fitting = int(size * IDLE_SECONDS / max(took, IDLE_SECONDS / 2))
        self._size = max(fitting, MIN_TOKENS)
        self._unsaved += took
        self._unlogged += took
        if not self._unfinished or self._unsaved > _SAVE_SECONDS:
            self._file.save(self.matrix)
            self._unsaved = 0.0
        if not self._unfinished or self._unlogged > _LOG_SECONDS:
            self._log(self._unlogged)
            self._unlogged = 0.0
        return left[: len(left) - len(self._left)]

    def stop_saving(self) -> None:
        """Keep further rows in memory only, as the target's weights may have changed.

        Rows of a model that may differ from its files are dropped: its weights may have been random
        until now.
        """
        self._file.close()
        if self._file.is_of_other_model:
            self.matrix.fill_(EMPTY)
            self._left = torch.arange(len(self.matrix), dtype=torch.int32)

    def _compute(self, forward: PrimeForward, size: int) -> float:
        """Compute the next rows in one forward of `size` tokens; returns the seconds it took."""
        started = perf_counter()
        tokens = self._left[:size].to(self.matrix.device)
        try:
            candidates = top_candidates(forward(self._bos, tokens), self.matrix.shape[1])
            # The copy waits for the forward.
            self.matrix[tokens.long()] = candidates.cpu().to(self.matrix.device)
        except Exception as error:
            # The engine can serve without these rows.
            self._failed = True
            self._logger.warning("Token Recycling is primed no further: %r", error)
        else:
            self._left = self._left[size:]
        return perf_counter() - started

    def _log(self, seconds: float) -> None:
        done, rows = self.progress
        self._logger.info(
            "Token Recycling is primed for %d of %d tokens, after %.1f s%s",
            done,
            len(self.matrix),
            seconds,
            "; the others follow while no request is running" if done < rows else "",
        )
