"""Best-first drafting: a tree grown for each request in each step, out of all that is known.

Beyond the paper: candidates come from the matrix, from the pair table and from the request's own
text, and each is worth what candidates of its kind were worth so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tree_kernels.context import LONGEST, Contexts, extend_contexts
from tree_kernels.growth import columns_of, grow
from tree_kernels.offers import ORIGINS, PAIR_STATES, ROW_STATES, TOP
from tree_kernels.selection import best_nodes
from tree_kernels.tally import Tally, count

from drafttree.drafter import DraftTree
from drafttree.verify import Verified
from recycle_plugin.tables import Tables

DEPTH = 8

# How often candidates were the target's next token, measured on Spec-Bench prompts: those of a
# token's row and of a pair's, by rank, and the copy after a suffix, by its length.
ROW_PRIORS = (0.30, 0.083, 0.055, 0.037, 0.025, 0.02, 0.012, 0.009)
PAIR_PRIORS = (0.487, 0.098, 0.045, 0.04, 0.023, 0.017, 0.011, 0.010)
COPY_PRIORS = (0.15, 0.4, 0.6, 0.7, 0.75, 0.85)
PAIR_WEIGHT = 0.85

MOST_CELLS = 1 << 16


def expected_priors() -> torch.Tensor:
    """What candidates are worth before any was verified, `float32 [ORIGINS]`."""
    row = torch.tensor((0.0, *ROW_PRIORS))
    pair = torch.tensor((0.0, *PAIR_PRIORS))[:, None]
    both = torch.cat((PAIR_WEIGHT * pair + (1 - PAIR_WEIGHT) * row, row[None]))
    copy = torch.tensor((0.0, *COPY_PRIORS))[:, None, None]
    # Others share what the copy leaves, and the copy may be one of theirs.
    left = (1 - copy) * both
    return torch.cat((copy + left, left[1:])).reshape(ORIGINS)


assert (2 * LONGEST + 1, PAIR_STATES, ROW_STATES) == (13, TOP + 2, TOP + 1)


def width_for(nodes: int) -> int:
    """How many nodes of a level may grow on, so that trees of `nodes` find room."""
    width = 2 * TOP
    while columns_of(width, DEPTH) <= nodes:
        width *= 2
    return width


class GrownDrafter:
    """Grows trees of at most `nodes` nodes, the root not counted."""

    max_depth = DEPTH

    def __init__(self, tables: Tables, nodes: int) -> None:
        self.tables = tables
        self._nodes = nodes
        self._width = width_for(nodes)
        self.tally = Tally.of(expected_priors().to(tables.matrix.device))

    def allot(self, slots: int, length: int) -> None:
        """Make room for the texts of requests in `slots` slots, of at most `length` tokens."""
        device = self.tables.matrix.device
        cells = min(MOST_CELLS, 1 << (LONGEST * length - 1).bit_length())
        self._contexts = Contexts.of(slots, length, cells, device)
        self._origins = torch.zeros(slots, self._nodes + 1, dtype=torch.int32, device=device)

    def start(self, slot: int, text: Sequence[int]) -> None:
        """A request begins, or begins anew, with the tokens that are known of it."""
        if self.tables.begin(slot):
            self.tally.reset()
        device = self.tables.matrix.device
        self._contexts.clear(slot)
        tokens = torch.as_tensor(text, dtype=torch.int32, device=device)
        self.extend(torch.tensor([slot], device=device), tokens[None])

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens `int32 [B, E]` came after the requests' texts; -1 for none."""
        extend_contexts(self._contexts, slots, tokens)

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """The token before each text's last, `int32 [B]`; -1 for none."""
        places = self._contexts.lengths[slots].long() - 2
        tokens = self._contexts.history[slots, places.clamp(min=0)]
        return torch.where(places < 0, -1, tokens)

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Grow a tree under each root (`int32 [B]`), its request's last token."""
        grown = grow(
            self.tables.matrix,
            self.tables.pairs,
            self._contexts,
            self.tally.priors,
            slots,
            roots,
            self._width,
            DEPTH,
        )
        tokens, parents, origins, num_nodes = best_nodes(grown, self._nodes)
        self._origins[slots] = origins
        return DraftTree(tokens, parents, num_nodes)

    def observe(
        self, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Write the top k of the logits into the rows of the tokens and of the pairs."""
        return self.tables.learn(tokens, before, logits)

    def accepted(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Learn what each kind of candidate is worth, and what the texts go on with."""
        count(self.tally, trees.tokens, trees.parents, self._origins[slots], verified.path)
        self.extend(slots, verified.emitted)

    def release(self, slots: Sequence[int]) -> None:
        """Requests ended; what was learnt is shared and stays."""
        self.tables.end(slots)

    def reset(self) -> None:
        """Forget everything learnt."""
        self.tables.reset()
        self.tally.reset()
