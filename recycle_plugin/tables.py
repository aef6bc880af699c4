"""What Token Recycling learns: which tokens the target thought likely after a token, or after two.

Row t of the adjacency matrix holds the target's k most likely next tokens the last time token t was
verified (arXiv 2408.08696, section 3.2). The pair table holds the same by the last two tokens, for
as many pairs as it has cells; a pair takes the cell of another with the same hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tree_kernels.adjacency import recycle, update_adjacency
from tree_kernels.offers import pair_cells

EMPTY = -1

PAIR_CELLS = 1 << 16


class Tables:
    """The tables that all requests of an engine share.

    Attributes:
        matrix: `int32 [V, k]`, most likely first; -1 in rows that were never written.
        pairs: `int32 [S, 2 + k]`: two tokens and what followed; -1 in free cells. S is 1 where
            pairs are not kept.
    """

    def __init__(
        self, vocab_size: int, k: int, device: torch.device, *, pairs: bool, hot_start: bool
    ) -> None:
        if vocab_size < k:
            raise ValueError(f"k={k} candidates do not fit a vocabulary of {vocab_size}: lower k")
        cells = PAIR_CELLS if pairs else 1
        self.matrix = torch.full((vocab_size, k), EMPTY, dtype=torch.int32, device=device)
        self.pairs = torch.full((cells, 2 + k), EMPTY, dtype=torch.int32, device=device)
        self._hot_start = hot_start
        self._running: set[int] = set()

    def begin(self, slot: int) -> bool:
        """A request begins; whether the tables were emptied for it."""
        cold = not self._hot_start and not self._running
        if cold:
            self.reset()
        self._running.add(slot)
        return cold

    def end(self, slots: Sequence[int]) -> None:
        """Requests ended."""
        self._running.difference_update(slots)

    def reset(self) -> None:
        """Empty the tables."""
        self.matrix.fill_(EMPTY)
        self.pairs.fill_(EMPTY)

    def learn(
        self, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Write the top k of the target's logits after each token into its row and its pair's.

        Args:
            tokens: `int32 [R]`; -1 to skip one. The last of equal tokens wins.
            before: `int32 [R]`, the token before each; -1 where it is not known.
            logits: `[R, V]`.

        Returns:
            `int32 [R]`: the most likely next token after each.
        """
        candidates = recycle(self.matrix, tokens, logits)
        rows = torch.cat((before[:, None], tokens[:, None], candidates), 1)
        cells = pair_cells(before, tokens, len(self.pairs))
        known = (tokens >= 0) & (before >= 0)
        update_adjacency(self.pairs, torch.where(known, cells, EMPTY).int(), rows)
        return candidates[:, 0]
