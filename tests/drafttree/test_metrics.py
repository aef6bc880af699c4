"""Counts of a step, compared with counts made by hand."""

from __future__ import annotations

import torch

from drafttree.metrics import Counters
from drafttree.tree import DraftTree
from drafttree.verify import verify_target


def int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_only_decoding_requests_are_counted_and_later_children_separately() -> None:
    # The root has two children, and the second of them has two more.
    parents = int32([[-1, 0, 0, 2, 2]] * 3 + [[-1] * 5])
    tokens = int32([[9, 1, 2, 3, 4]] * 3 + [[9, -1, -1, -1, -1]])
    trees = DraftTree(tokens, parents, torch.tensor([5, 5, 5, 1], dtype=torch.int32))
    target = int32([[2, 0, 3, 0, 0], [1, 0, 0, 0, 0], [2, 0, 4, 0, 0], [7, 0, 0, 0, 0]])
    verified = verify_target(trees, target, max_depth=2)
    counters = Counters(torch.device("cpu"))
    counters.add_step(torch.tensor([True, True, False, True]), trees, verified)
    assert counters.as_dict() == {
        "steps": 3,
        "emitted": 3 + 2 + 1,
        "drafted_steps": 2,
        "draft_tokens": 8,
        "accepted_tokens": 3,
        "non_first_child_accepted": 1,
        "kv_rows_moved": 2,
    }
    counters.add_step(torch.tensor([True, False]), DraftTree.of_roots(int32([[1, 2]])[0]), verified)
    counters.add_plain_step(4)
    counts = counters.as_dict()
    assert (counts["steps"], counts["emitted"], counts["drafted_steps"]) == (8, 11, 2)
