"""Cuts draft trees to chains."""

from __future__ import annotations

from drafttree.tree import DraftTree
from drafttree.vllm.first_paths import first_paths


def as_chains(trees: DraftTree) -> DraftTree:
    """The path of first children of each tree; trees that are chains stay as they are.

    A drafter that knows `Target.longest_chain` drafts chains by itself.
    """
    if not trees.drafted:
        return trees
    size = trees.tree_size
    paths, _ = first_paths(trees, size > 0, trees.tokens.shape[1] - 1)
    drafts = (paths.tokens[:, 1:] >= 0).sum(1, dtype=size.dtype)
    return DraftTree(paths.tokens, paths.parents, 1 + drafts)
