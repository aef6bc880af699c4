"""The mapping between the rows of a batch and the nodes of its trees."""

from __future__ import annotations

import numpy as np
import torch

from drafttree.grammar.forced_tokens import ForcedTokens
from drafttree.tree import Verified
from drafttree.vllm.step import StepTrees
from drafttree.vllm.stored_tree import ROOT_ONLY, StoredTree
from drafttree.vllm.structured.shapes import Bound

TREE = StoredTree(np.array([-1, 0, 0, 1], np.int32), np.array([0, 1, 1, 2], np.int32))
CHAIN = StoredTree(np.array([-1, 0, 1], np.int32), np.array([0, 1, 2], np.int32))
NAMES = ["truncated to two drafts", "prefill", "whole", "without a draft"]


def step() -> StepTrees:
    """A step with 3 rows of a tree, 5 of a prompt, 3 of a chain, and 1 without drafts."""
    return StepTrees.of_batch(
        NAMES,
        {NAMES[0]: [11, 12], NAMES[2]: [13, 14]},
        {NAMES[0]: TREE, NAMES[2]: CHAIN},
        np.array([3, 5, 3, 1], np.int32),
        np.array([True, True, True, False]),
        rows=torch.tensor([0, 1, 2, 7, 8, 9, 10, 11]),
    )


def test_rows_and_nodes() -> None:
    trees = step()
    assert trees.drafted
    assert trees.max_depth == 2
    rows = trees.by_node(torch.arange(8))
    assert rows.tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 6], [7, 7, 7]]
    nodes = torch.arange(12, dtype=torch.int32).view(4, 3)
    assert trees.by_row(nodes).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    tensors = trees.tensors
    assert tensors.request_of_row.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    assert tensors.starts.tolist() == [0, 3, 4, 7]
    # In a chain the third row's position would be one higher.
    assert tensors.position_offsets.tolist() == [0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert tensors.counted.tolist() == [True, False, True, False]


def test_trees_and_masks() -> None:
    trees = step()
    drafts = trees.trees(torch.arange(20, 28))
    assert drafts.tokens.tolist() == [[20, 21, 22], [23, -1, -1], [24, 25, 26], [27, -1, -1]]
    assert drafts.parents.tolist() == [[-1, 0, 0], [-1, -1, -1], [-1, 0, 1], [-1, -1, -1]]
    assert drafts.tree_size.tolist() == [3, 1, 3, 1]
    masks = trees.masks()
    assert masks.requests.tolist() == [0, 2]
    assert masks.tree_sizes.tolist() == [3, 3]
    assert masks.masks.int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
    ]


def test_masks_where_all_requests_have_trees() -> None:
    trees = StepTrees.of_batch(
        ["a"], {"a": [5, 6]}, {"a": CHAIN}, np.array([3]), np.array([True]), torch.arange(3)
    )
    assert trees.masks().masks.int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


def test_padding_of_a_request_without_a_tree_is_a_chain() -> None:
    trees = StepTrees.of_batch(
        ["joins", "runs"],
        {"joins": [-1, -1], "runs": [5, 6, 7]},
        {"runs": TREE},
        np.array([3, 4]),
        np.array([False, True]),
        torch.arange(7),
    )
    assert trees.tensors.parents.tolist() == [[-1, 0, 1, -1], [-1, 0, 0, 1]]
    assert trees.tensors.position_offsets.tolist() == [0, 0, 0, 0, 0, -1, -1]


def test_without_drafts_a_row_is_a_request() -> None:
    trees = StepTrees.of_batch(
        ["a", "b"], {}, {}, np.array([1, 4]), np.array([True, True]), torch.tensor([0, 4])
    )
    assert not trees.drafted
    assert trees.by_node(torch.tensor([3, 4])).tolist() == [[3], [4]]
    assert trees.by_row(torch.tensor([[3], [4]])).tolist() == [3, 4]
    assert trees.trees(torch.tensor([3, 4])).tokens.tolist() == [[3], [4]]
    assert trees.tensors.counted.tolist() == [True, False]


def test_nodes_in_the_columns_in_which_they_were_proposed() -> None:
    """Of the first tree columns 1 and 3 were dropped."""
    thinned = StoredTree(TREE.parents[:3], TREE.depths[:3], np.array([0, 2, 4]))
    trees = StepTrees.of_batch(
        ["a", "b"],
        {"a": [5, 6], "b": [7]},
        {"a": thinned, "b": CHAIN},
        np.array([3, 2]),
        np.array([True, True]),
        torch.arange(5),
    )
    drafts = trees.trees(torch.tensor([4, 5, 6, 3, 7]))
    path = torch.tensor([[0, 2], [0, -1]], dtype=torch.int32)
    verified = Verified(path, path, torch.tensor([2, 1], dtype=torch.int32))
    proposed, outcome = trees.as_proposed(drafts, verified)
    assert proposed.tokens.tolist() == [[4, -1, 5, -1, 6], [3, 7, -1, -1, -1]]
    assert proposed.parents.tolist() == [[-1, -1, 0, -1, 0], [-1, 0, -1, -1, -1]]
    assert proposed.tree_size.tolist() == [5, 2]
    assert outcome.path.tolist() == [[0, 4], [0, -1]]
    whole = step()
    assert whole.as_proposed(drafts, verified)[0] is drafts


def test_the_last_node_of_a_batch_without_padding_stays() -> None:
    thinned = StoredTree(TREE.parents[:3], TREE.depths[:3], np.array([0, 2, 4]))
    scheduled, whole = {"a": [5, 6]}, np.array([True])
    trees = StepTrees.of_batch(
        ["a"], scheduled, {"a": thinned}, np.array([3]), whole, torch.arange(3)
    )
    drafts = trees.trees(torch.tensor([4, 5, 6]))
    path = torch.tensor([[0, 2]], dtype=torch.int32)
    verified = Verified(path, path, torch.tensor([2], dtype=torch.int32))
    proposed, outcome = trees.as_proposed(drafts, verified)
    assert proposed.tokens.tolist() == [[4, -1, 5, -1, 6]]
    assert proposed.tree_size.tolist() == [5]
    assert outcome.path.tolist() == [[0, 4]]


def test_a_tree_that_was_bound_to_a_grammar() -> None:
    """Column 2 is forced after column 1, and two tokens that were not proposed after column 2.

    Column 1 was proposed, but is likely under the grammar anyway.
    """
    proposed = StoredTree(
        np.array([-1, 0, 1, 2, 2], np.int32), np.array([0, 1, 2, 3, 3]), np.array([0, 1, 3, 5, 6])
    )
    shape = Bound(
        [-1, 0, 1, 2, 2, 4],
        [0, 1, 2, 4, -1, -1],
        [False, False, True, False, True, False],
        [False, True, True, False, True, True],
    )
    tree = StoredTree.bound(proposed, shape)
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 4]
    assert tree.columns is not None
    assert tree.columns.tolist() == [0, 1, 3, 6, -1, -1]
    trees = StepTrees.of_batch(
        ["a", "b"],
        {"a": [5, 6, 7, 8, 9], "b": [3]},
        {"a": tree, "b": CHAIN},
        np.array([6, 2]),
        np.array([True, True]),
        torch.arange(8),
    )
    assert trees.max_depth == 4
    assert trees.parents.tolist() == [[-1, 0, 1, 2, 2, 4], [-1, 0, -1, -1, -1, -1]]
    drafts = trees.trees(torch.tensor([4, 5, 6, 7, 8, 9, 2, 3]))
    path = torch.tensor([[0, 1, 2, 4], [0, 1, -1, -1]], dtype=torch.int32)
    verified = Verified(path, path, torch.tensor([4, 2], dtype=torch.int32))
    shown, outcome = trees.as_proposed(drafts, verified)
    assert shown.tokens.tolist() == [[4, 5, -1, -1, -1, -1, 7], [2, 3, -1, -1, -1, -1, -1]]
    assert shown.parents.tolist() == [[-1, 0, -1, -1, -1, -1, 3], [-1, 0, -1, -1, -1, -1, -1]]
    assert outcome.path.tolist() == [[0, 1, 3, -1], [0, 1, -1, -1]]
    # Of each request, the nodes that were proposed, and the accepted ones that were not needed.
    assert outcome.bound is not None
    assert outcome.bound.tolist() == [[4, 3], [2, 0]]
    assert outcome.rows == 8
    assert trees.forced is not None
    counted = ForcedTokens(torch.device("cpu"))
    assert counted.by_source() == []
    assert trees.columns is not None
    columns = torch.from_numpy(trees.columns)
    counted.add_step(columns, torch.from_numpy(trees.forced), drafts, verified)
    assert counted.by_source() == [
        {"source": "forced by a grammar", "tried": 2, "hit": 2, "share": 1.0},
        {"source": "likely under a grammar", "tried": 1, "hit": 0, "share": 0.0},
    ]


def test_a_root_alone_gets_forced_tokens() -> None:
    shape = Bound([-1, 0, 1], [0, -1, -1], *[[False, True, True]] * 2)
    trees = StepTrees.of_batch(
        ["a"],
        {"a": [5, 6]},
        {"a": StoredTree.bound(ROOT_ONLY, shape)},
        np.array([3]),
        np.array([True]),
        torch.arange(3),
    )
    path = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    verified = Verified(path, path, torch.tensor([3], dtype=torch.int32))
    shown, outcome = trees.as_proposed(trees.trees(torch.tensor([4, 5, 6])), verified)
    assert (shown.tokens.tolist(), shown.parents.tolist()) == ([[4]], [[-1]])
    assert not shown.drafted
    assert outcome.path.tolist() == [[0, -1, -1]]
    assert outcome.bound is not None
    assert outcome.bound.tolist() == [[1, 2]]
