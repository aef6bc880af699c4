"""What Token Recycling learns: which tokens the target thought likely after a token, or after two.

Row t of the adjacency matrix holds the target's k most likely next tokens the last time token t was
verified (arXiv 2408.08696, section 3.2). The pair table holds the same by the last two tokens, for
as many pairs as it has cells; a pair takes the cell of another with the same hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tree_kernels.adjacency import recycle, top_candidates
from tree_kernels.offers import ALONE
from tree_kernels.pairs import update_pairs
from tree_kernels.tally import Tally

from drafttree.transfer import on_device
from recycle_plugin.priors import expected_priors

if TYPE_CHECKING:
    from recycle_plugin.background import Priming
    from recycle_plugin.files import Keeper

EMPTY = -1

PAIR_CELLS = 1 << 16
PRIVATE_CELLS = 1 << 12


class Tables:
    """The tables that all requests of an engine share.

    Attributes:
        matrix: `int32 [V, k]`, most likely first; -1 in rows that are not known.
        pairs: `int32 [P, S, 2 + k]`: two tokens and what followed; -1 in free cells. S is 1 where
            pairs are not kept; P is 1 where requests share what is learnt. Else each has a table of
            its own, which holds single tokens too, and the matrix keeps what was primed.
        tally: what candidates turned out to be worth.
        priming: what fills rows before they are learnt.
        keeper: what saves the tables.
    """

    def __init__(
        self, vocab_size: int, k: int, device: torch.device, *, pairs: bool, hot_start: bool
    ) -> None:
        if vocab_size < k:
            raise ValueError(
                f"k={k} candidates do not fit a vocabulary of {vocab_size}: lower k, with "
                "drafting='paper'"
            )
        self.matrix = torch.full((vocab_size, k), EMPTY, dtype=torch.int32, device=device)
        shape = 1, PAIR_CELLS if pairs else 1, 2 + k
        self.pairs = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
        self._pairs = pairs
        self._private = False
        self.tally = Tally.of(expected_priors().to(device))
        self.priming: Priming | None = None
        self.keeper: Keeper | None = None
        self._primed = self.matrix
        self._hot_start = hot_start
        self._running: set[int] = set()

    def part(self, slots: int) -> None:
        """From now on, nothing that is learnt of one of the requests in `slots` reaches another."""
        self._private = True
        shape = slots, PRIVATE_CELLS, self.pairs.shape[2]
        self.pairs = torch.full(shape, EMPTY, dtype=torch.int32, device=self.matrix.device)

    def begin(self, slot: int) -> None:
        """A request begins; with a cold start the first forgets what was learnt."""
        if self._private:
            self.pairs[slot] = EMPTY
        elif not self._hot_start and not self._running:
            self.reset()
        self._running.add(slot)

    def end(self, slots: Sequence[int]) -> None:
        """Requests ended."""
        self._running.difference_update(slots)

    def reset(self) -> None:
        """Forget what was learnt; what was primed stays."""
        if self._primed is self.matrix:
            self.matrix.fill_(EMPTY)
        else:
            self.matrix.copy_(self._primed)
        self.pairs.fill_(EMPTY)
        self.tally.reset()

    def refresh(self) -> None:
        """Take over rows that were primed meanwhile, once a step; what was learnt stays."""
        if self.priming is None:
            return
        running = self.priming.running
        while (rows := self.priming.poll()) is not None:
            if self._primed is self.matrix:
                self._primed = torch.full_like(self.matrix, EMPTY)
            part = slice(rows.first, rows.first + len(rows.candidates))
            self._primed[part] = on_device(rows.candidates.numpy(), self.matrix.device)
            unknown = self.matrix[part, :1] == EMPTY
            self.matrix[part] = torch.where(unknown, self._primed[part], self.matrix[part])
        if not running:
            self.priming = None

    def learn(
        self, slots: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Write the top k of the target's logits after each token into its row and its pair's.

        Args:
            slots: `int64 [R]`, of the requests.
            tokens: `int32 [R]`; -1 to skip one. The last of equal tokens wins.
            before: `int32 [R]`, the token before each; -1 where it is not known.
            logits: `[R, V]`.

        Returns:
            `int32 [R]`: the most likely next token after each.
        """
        if self._private:
            candidates = top_candidates(logits, self.matrix.shape[1])
            alone = torch.full_like(tokens, ALONE)
            update_pairs(self.pairs, slots, tokens, alone, candidates)
        else:
            candidates = recycle(self.matrix, tokens, logits)
        if self._pairs:
            update_pairs(self.pairs, slots, tokens, before, candidates)
        if self.keeper is not None:
            self.keeper.touch()
        return candidates[:, 0]
