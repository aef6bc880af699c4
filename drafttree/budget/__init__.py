"""Node budget: chooses the sizes of draft trees, so that drafting is never slower for long.

A drafter uses `NodeBudget`, or `ShapeBudget` if it asks a model for its drafts;
`docs/node_budget.md` explains the model behind both.
"""

from drafttree.budget.forward_profile import measure_forwards
from drafttree.budget.node_budget import NodeBudget, candidate_sizes
from drafttree.budget.shape_budget import ShapeBudget
from drafttree.budget.tree_choice import TreeChoice
from drafttree.tree_shape import TreeShape

__all__ = [
    "NodeBudget",
    "ShapeBudget",
    "TreeChoice",
    "TreeShape",
    "candidate_sizes",
    "measure_forwards",
]
