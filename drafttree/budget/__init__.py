"""Node budget: chooses `num_draft_tokens` in each step, so that drafting is never slower for long.

A drafter uses `NodeBudget`; `docs/node_budget.md` explains the model behind it.
"""

from drafttree.budget.forward_profile import measure_forwards
from drafttree.budget.node_budget import NodeBudget, candidate_sizes

__all__ = ["NodeBudget", "candidate_sizes", "measure_forwards"]
