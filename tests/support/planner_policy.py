"""The planner as a policy of `simulated_decoding`."""

from __future__ import annotations

from simulated_decoding import Choice, FloatArray, Scenario, Step

from drafttree.budget.planner import Planner
from drafttree.budget.tree_choice import TreeChoice

SIZES = (0, 3, 7, 11, 15, 23, 31, 47, 63, 80)


class Planned:
    """Decodes as the planner chooses.

    Args:
        scenario: The scenario, whose forwards are measured at the start.
        spines: Whether requests may take further nodes.
    """

    def __init__(self, scenario: Scenario, *, spines: bool = True) -> None:
        self.planner = Planner(SIZES, scenario.forwards())
        self._spines = spines
        self._choice = TreeChoice(0)

    def choose(self, scores: FloatArray) -> Choice:
        """Choose for scores `[B, MAX_NODES]`, the best first."""
        planner, batch_size = self.planner, len(scores)
        if planner.should_skip_drafting(batch_size):
            self._choice = TreeChoice(0)
            return Choice(0, looked_up=False)
        if self._spines:
            self._choice = planner.choose_best_first(batch_size, scores)
        else:
            size = planner.choose(batch_size, planner.expected_tokens(scores))
            self._choice = TreeChoice(size)
        choice = self._choice
        return Choice(choice.num_draft_tokens, choice.spine, choice.min_score)

    def learn(self, step: Step) -> None:
        """Learn from a step that was run."""
        self.planner.record_step(
            step.batch_size,
            self._choice,
            step.rows,
            step.seconds,
            step.draft_seconds,
            step.emitted,
        )
