"""Trees are truncated to a share of the step and to the end of the request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafttree.tree import DraftTree
from drafttree.vllm.pending_drafts import PendingDrafts

PARENTS = [[-1, 0, 0, 1, 1, 3], [-1, 0, 1, -1, -1, -1]]
TOKENS = [[7, 11, 12, 13, 14, 15], [8, 21, 22, -1, -1, -1]]
TREES = DraftTree(
    torch.tensor(TOKENS, dtype=torch.int32),
    torch.tensor(PARENTS, dtype=torch.int32),
    torch.tensor([6, 3], dtype=torch.int32),
)


@pytest.mark.parametrize(
    ("share", "left", "wanted", "expected"),
    [
        (81, [9, 9], [True, True], [[11, 12, 13, 14, 15], [21, 22]]),
        (4, [9, 9], [True, True], [[11, 12, 13], [21, 22]]),
        (1, [9, 9], [True, True], [[], []]),
        (81, [3, 2], [True, True], [[11, 12, 13, 14], [21]]),
        (81, [1, 9], [True, True], [[], [21, 22]]),
        (81, [9, 9], [False, True], [[], [21, 22]]),
    ],
)
def test_nodes_that_do_not_fit_are_dropped(
    share: int, left: list[int], wanted: list[bool], expected: list[list[int]]
) -> None:
    pending = PendingDrafts.of(["a", "b"], np.array(wanted), TREES)
    drafts, stored = pending.truncate(share, np.array(left, np.int32))
    assert drafts == expected
    depths = [[0, 1, 1, 2, 2, 3], [0, 1, 2]]
    for row, tree in enumerate(stored):
        size = 1 + len(expected[row])
        if size > 1:
            assert tree.parents.tolist() == PARENTS[row][:size]
            assert tree.depths.tolist() == depths[row][:size]


def test_nodes_below_a_token_that_ends_the_request_are_dropped() -> None:
    pending = PendingDrafts.of(["a", "b"], np.array([True, True]), TREES)
    left = np.array([9, 9], np.int32)
    drafts, stored = pending.truncate(81, left, [{11, 99}, set()])
    assert drafts == [[11, 12], [21, 22]]
    assert stored[0].columns is None
    drafts, stored = pending.truncate(81, left, [{13, 7}, {21}])
    assert drafts == [[11, 12, 13, 14], [21]]
    drafts, stored = pending.truncate(4, left, [{12}, {22}])
    assert drafts == [[11, 12, 13], [21, 22]]


def test_the_other_nodes_keep_their_places() -> None:
    """Node 1 ends the request; its children are columns 3 and 4, and column 5 is below node 2."""
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32)
    trees = DraftTree(TREES.tokens[:1], parents, TREES.tree_size[:1])
    pending = PendingDrafts.of(["a"], np.array([True]), trees)
    drafts, stored = pending.truncate(81, np.array([9], np.int32), [{11}])
    assert drafts == [[11, 12, 15]]
    assert stored[0].parents.tolist() == [-1, 0, 0, 2]
    assert stored[0].depths.tolist() == [0, 1, 1, 2]
    assert stored[0].columns is not None
    assert stored[0].columns.tolist() == [0, 1, 2, 5]


def test_each_request_may_have_its_own_share() -> None:
    verified = torch.tensor([2, 1], dtype=torch.int32)
    pending = PendingDrafts.of(["a", "b"], np.array([True, True]), TREES, verified)
    drafts, _ = pending.truncate(np.array([6, 2], np.int32), np.array([9, 9], np.int32))
    assert drafts == [[11, 12, 13, 14, 15], [21]]
    assert pending.to_verify() == {"a": 2, "b": 1}
    whole = PendingDrafts.of(["a", "b"], np.array([True, True]), TREES)
    assert whole.to_verify() == {"a": 5, "b": 2}
