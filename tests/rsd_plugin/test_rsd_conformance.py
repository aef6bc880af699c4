"""RSD's drafter is what hosts rely on, also when a node budget chooses the size of its trees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafttree import DraftForward, DraftTree, Verified
from drafttree.budget import NodeBudget, measure_forwards
from drafttree.testing import VOCAB_SIZE, check_drafter, check_method
from rsd_plugin import METHOD, RsdDrafter, RsdOptions
from rsd_plugin.config import Shape
from rsd_plugin.drafter import Drawn
from rsd_plugin.noise import StepNoise

WIDTH, LEVELS = 3, 4


@pytest.mark.parametrize(
    "tree", ["beam:3x4", "branch:3-2-1", "beam:1x3", "beam:9x1", "branch:1-1-1"]
)
@pytest.mark.parametrize("verify", ["recursive", "traversal"])
def test_the_drafter_passes_and_is_accepted(tree: str, verify: str) -> None:
    assert check_method(METHOD, {"model": "draft", "tree": tree, "verify": verify}) > 50


class SizedRsd(RsdDrafter):
    """Lets a node budget choose the number of levels in each step."""

    def __init__(self) -> None:
        options = RsdOptions(model="draft", tree=f"beam:{WIDTH}x{LEVELS}")
        super().__init__(options, VOCAB_SIZE)
        self.sizes = tuple(range(0, WIDTH * LEVELS + 1, WIDTH))
        self.chosen: list[int] = []
        self.now = 0.0
        self.expected = torch.tensor([1.0, 1.8, 2.4, 2.9, 3.3])

    def profile(self, measure_forward: Callable[[int], float], max_tokens: int) -> None:
        forwards = measure_forwards(measure_forward, max_tokens)
        # A step takes as long as a forward, whatever else the machine does.
        self.step_seconds = forwards[1]
        self.budget = NodeBudget.from_forwards(self.sizes, forwards, lambda: self.now)

    def propose(
        self,
        slots: torch.Tensor,
        roots: torch.Tensor,
        seeds: torch.Tensor,
        lengths: torch.Tensor,
        sampled: torch.Tensor,
        forward: DraftForward,
    ) -> tuple[DraftTree, Drawn]:
        size = 0
        if not self.budget.should_skip_drafting(slots):
            # Texts are easier to predict in some steps than in others: in every third none of the
            # levels is accepted, only the first, or all of them.
            most = (1.0, float(self.expected[1]), float(self.expected[-1]))
            expected = self.expected.clamp(max=most[len(self.chosen) % 3])
            size = self.budget.choose(slots, expected.expand(len(slots), -1))
        self.chosen.append(size)
        if size:
            self._shape = Shape((WIDTH,) * (size // WIDTH), None)
            trees, drawn = super().propose(slots, roots, seeds, lengths, sampled, forward)
        else:
            trees = DraftTree.of_roots(roots)
            forward(trees, 0)  # writes the roots' KV
            noise = StepNoise(seeds, lengths)
            drawn = Drawn(torch.zeros(len(roots), 0, self._vocab_size), noise)
        return trees, drawn

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        self.budget.verified(slots, trees, verified)
        self.now += self.step_seconds

    def explain(self) -> list[dict[str, float]]:
        return self.budget.explain()


def test_a_node_budget_may_choose_the_size_of_the_trees() -> None:
    drafter = SizedRsd()
    accepted = check_drafter(drafter, WIDTH * LEVELS, LEVELS)
    assert accepted > 20
    assert len(set(drafter.chosen)) >= 3
    assert {0, WIDTH * LEVELS} <= set(drafter.chosen)
    # Steps were measured, and their sizes are reported.
    assert sum(row["steps"] for row in drafter.explain()) > 10
