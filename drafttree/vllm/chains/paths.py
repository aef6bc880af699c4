"""Cuts draft trees to chains."""

from __future__ import annotations

from dataclasses import replace

from drafttree.tree import DraftTree
from drafttree.vllm.v2.chains import first_paths


def as_chains(trees: DraftTree) -> DraftTree:
    """The path of first children of each tree; trees that are chains stay as they are.

    A drafter that knows `Target.longest_chain` drafts chains by itself.
    """
    if not trees.drafted:
        return trees
    paths = first_paths(trees, trees.tree_size > 0, trees.tokens.shape[1] - 1)
    return replace(paths, tree_size=(paths.tokens[:, 1:] >= 0).sum(1, dtype=paths.tree_size.dtype) + 1)
