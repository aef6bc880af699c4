"""Node budget: chooses the sizes of draft trees, so that drafting is never slower for long.

A drafter uses `NodeBudget`; `docs/node_budget.md` explains the model behind it.
"""

from drafttree.budget.forward_profile import measure_forwards
from drafttree.budget.node_budget import NodeBudget, candidate_sizes
from drafttree.budget.tree_choice import TreeChoice

__all__ = ["NodeBudget", "TreeChoice", "candidate_sizes", "measure_forwards"]
