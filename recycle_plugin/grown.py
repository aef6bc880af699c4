"""Best-first drafting: a tree grown for each request in each step, out of all that is known.

Beyond the paper: candidates come from the matrix, from the pair table and from the request's own
text, and each is worth what candidates of its kind were worth so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tree_kernels.context import LONGEST, Contexts, extend_contexts, last_but_one
from tree_kernels.growth import Grown, columns_of, grow
from tree_kernels.offers import TOP
from tree_kernels.selection import best_nodes
from tree_kernels.tally import count

from drafttree.drafter import DraftTree
from drafttree.transfer import on_device
from drafttree.verify import Verified
from recycle_plugin.acceptance import by_source
from recycle_plugin.pace import Pace, ladder_to, measured_costs
from recycle_plugin.planner import Planner
from recycle_plugin.priors import DEPTH
from recycle_plugin.tables import Tables

MOST_CELLS = 1 << 16

UNTIMED_NODES = 7
"""What `auto` drafts on a CPU whose forwards could not be timed."""


def width_for(nodes: int) -> int:
    """How many nodes of a level may grow on, so that trees of `nodes` find room."""
    width = 2 * TOP
    while columns_of(width, DEPTH) <= nodes:
        width *= 2
    return width


class GrownDrafter:
    """Grows trees of `nodes` nodes, the root not counted, or with `auto` of as many as pay."""

    max_depth = DEPTH

    def __init__(self, tables: Tables, nodes: int, *, auto: bool, private: bool) -> None:
        self.tables = tables
        self._private = private
        self._nodes = nodes
        self._auto = auto
        self._width = width_for(nodes)
        self._pace: Pace | None = None

    def allot(self, slots: int, length: int) -> None:
        """Make room for the texts of requests in `slots` slots, of at most `length` tokens."""
        device = self.tables.matrix.device
        if self._private:
            self.tables.part(slots)
        cells = min(MOST_CELLS, 1 << (LONGEST * length - 1).bit_length())
        self._contexts = Contexts.of(slots, length, cells, device)
        self._origins = torch.zeros(slots, self._nodes + 1, dtype=torch.int32, device=device)
        self._compile()

    def _compile(self) -> None:
        """Have the kernels compiled before the first request, on a text without tokens."""
        slots = torch.zeros(1, dtype=torch.int64, device=self._origins.device)
        none = torch.full((1, 1), -1, dtype=torch.int32, device=self._origins.device)
        self.extend(slots, none)
        tokens, parents, origins, _ = best_nodes(self._grow(slots, none[0]), 0)
        count(self.tables.tally, tokens, parents, origins, none)

    def _grow(self, slots: torch.Tensor, roots: torch.Tensor) -> Grown:
        tables = self.tables
        return grow(
            tables.matrix,
            tables.pairs,
            self._contexts,
            tables.tally.priors,
            slots,
            roots,
            self._width,
            DEPTH,
        )

    def calibrate(self, forward: Callable[[int], float], most: int) -> None:
        """With `auto`, time forwards of up to `most` tokens, and plan by them from now on."""
        if self._auto:
            ladder = ladder_to(self._nodes, self.tables.matrix.device)
            self._pace = Pace(Planner(ladder, measured_costs(forward, most)))

    def start(self, slot: int, text: Sequence[int]) -> None:
        """A request begins, or begins anew, with the tokens that are known of it."""
        if self._pace is not None:
            self._pace.interrupted()
        self.tables.begin(slot)
        device = self.tables.matrix.device
        self._contexts.clear(slot)
        tokens = on_device(np.array(text, np.int32)[None], device)
        self.extend(on_device(np.array([slot]), device), tokens)

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens `int32 [B, E]` came after the requests' texts; -1 for none."""
        extend_contexts(self._contexts, slots, tokens)

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """The token before each text's last, `int32 [B]`; -1 for none."""
        return last_but_one(self._contexts, slots)

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Grow a tree under each root (`int32 [B]`), its request's last token; -1 for none."""
        self.tables.refresh()
        pace, nodes = self._pace, self._nodes
        if self._auto and pace is None and roots.device.type == "cpu":
            nodes = min(nodes, UNTIMED_NODES)
        if pace is not None and pace.rests(slots):
            return DraftTree.of_roots(roots)
        grown = self._grow(slots, roots)
        if pace is not None:
            nodes = pace.choose(slots, grown.scores)
            if nodes == 0:
                return DraftTree.of_roots(roots)
        tokens, parents, origins, num_nodes = best_nodes(grown, nodes)
        self._origins[slots, : nodes + 1] = origins
        trees = DraftTree(tokens, parents, num_nodes)
        if pace is not None:
            pace.proposed(trees)
        return trees

    def observe(
        self, slots: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Write the top k of the logits into the rows of the tokens and of the pairs."""
        return self.tables.learn(slots, tokens, before, logits)

    def accepted(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Learn what each kind of candidate is worth, and what the texts go on with."""
        if self._pace is not None:
            self._pace.verified(slots, trees, verified)
        if trees.drafted and not self._private:
            count(
                self.tables.tally, trees.tokens, trees.parents, self._origins[slots], verified.path
            )
        self.extend(slots, verified.emitted)

    def release(self, slots: Sequence[int]) -> None:
        """Requests ended; what was learnt is shared and stays."""
        self.tables.end(slots)

    def reset(self) -> None:
        """Forget everything learnt."""
        self.tables.reset()

    def explain(self) -> list[dict[str, Any]]:
        """With `auto`, what was foreseen of each number of nodes and what came of it."""
        return [] if self._pace is None else list(self._pace.planner.explain())

    def acceptance(self) -> dict[str, Any]:
        """How often candidates of each source were accepted; a cold start forgets it too."""
        return {"sources": by_source(self.tables.tally)}
