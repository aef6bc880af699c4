"""Trees that were drafted before their step, in whose batch other requests may be."""

from __future__ import annotations

import torch

from drafttree.tree import DraftTree
from drafttree.vllm.drafters.known_trees import KnownTrees

TREES = DraftTree(
    torch.tensor([[3, 7, 8], [-1, -1, -1], [5, 9, -1]], dtype=torch.int32),
    torch.tensor([[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]], dtype=torch.int32),
    torch.tensor([3, 1, 2], dtype=torch.int32),
)


def test_requests_keep_their_trees_in_another_batch() -> None:
    known = KnownTrees(["a", "b", "c"], TREES)
    same = known.of_batch(["a", "b", "c"], torch.tensor([3, 4, 5], dtype=torch.int32))
    assert same.tokens.tolist() == [[3, 7, 8], [4, -1, -1], [5, 9, -1]]
    assert same.parents.tolist() == TREES.parents.tolist()
    other = known.of_batch(["c", "new", "a"], torch.tensor([5, 6, 3], dtype=torch.int32))
    assert other.tokens.tolist() == [[5, 9, -1], [6, -1, -1], [3, 7, 8]]
    assert other.parents.tolist() == [[-1, 0, -1], [-1, -1, -1], [-1, 0, 1]]
    other.check(2)
