"""Draft trees are valid however they are built or truncated, and invalid ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttree.tree import MAX_DRAFT_TOKENS, DraftTree, StaticTree


def check_invariants(tree: StaticTree) -> None:
    parents = tree.parents
    depths = [0]
    for node in range(1, tree.num_draft_tokens + 1):
        assert 0 <= parents[node] < node
        depths.append(depths[parents[node]] + 1)
    assert depths == sorted(depths)
    assert depths[-1] == tree.depth
    assert list(tree.level_ends) == [
        sum(depth <= level for depth in depths) for level in range(tree.depth + 1)
    ]
    for node, path in enumerate(tree.paths, start=1):
        walked: list[int] = []
        while node:
            walked.append(tree.ranks[node])
            node = parents[node]
        assert tuple(reversed(walked)) == path


@given(
    nodes=st.integers(1, MAX_DRAFT_TOKENS),
    priors=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_budget_takes_the_most_probable_nodes(nodes: int, priors: list[float]) -> None:
    tree = StaticTree.from_budget(nodes, priors)
    check_invariants(tree)

    def probability(path: tuple[int, ...]) -> float:
        return prod(priors[rank] for rank in path)

    if tree.num_draft_tokens < nodes:
        assert len(priors) == 1
        return
    worst = min(map(probability, tree.paths))
    inside = {(), *tree.paths}
    for path, rank in product(inside, range(len(priors))):
        child = (*path, rank)
        if child not in inside and len(child) <= 32:
            assert probability(child) <= worst * (1 + 1e-9)


def test_branching_factors_give_the_full_tree() -> None:
    tree = StaticTree.from_branching([3, 2, 1])
    check_invariants(tree)
    assert tree.level_ends == (1, 4, 10, 16)
    assert tree.width == 3


def test_paths_may_come_in_any_order() -> None:
    tree = StaticTree.from_paths([[1, 0], [0, 2], [1], [0], [0, 2, 1]])
    check_invariants(tree)
    assert tree.paths == ((0,), (1,), (0, 2), (1, 0), (0, 2, 1))


def test_files_are_read_and_named_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"paths": [[0], [0, 1]]}))
    assert StaticTree.from_file(file).paths == ((0,), (0, 1))
    for content in ("{", "[]", '{"paths": 3}', '{"paths": [[0], [1, 1]]}'):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"tree\.json"):
            StaticTree.from_file(file)


@st.composite
def draft_trees(draw: st.DrawFn) -> DraftTree:
    """Valid trees of up to 4 requests, some of which have no root, with free columns among them."""
    batch, width = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    tokens = torch.full((batch, width), -1, dtype=torch.int32)
    parents, sizes = torch.full_like(tokens, -1), torch.zeros(batch, dtype=torch.int32)
    for row in range(batch):
        last = -1
        if draw(st.integers(0, 4)):
            tokens[row, 0], last = draw(st.integers(0, 99)), 0
            depth = {0: 0}
            for column in range(1, width):
                # Breadth-first: no parent shallower than the last node's.
                fit = [node for node, level in depth.items() if level + 1 >= depth[last]]
                if draw(st.booleans()):
                    parents[row, column] = draw(st.sampled_from(fit))
                    # Tokens differ, so that no parent has the same child twice.
                    tokens[row, column], last = 100 + column, column
                    depth[column] = depth[int(parents[row, column])] + 1
        sizes[row] = draw(st.integers(last + 1, width))
    return DraftTree(tokens, parents, sizes)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(trees=draft_trees())
def test_valid_trees_pass(trees: DraftTree) -> None:
    width = trees.tokens.shape[1]
    trees.check()
    trees.check(width - 1)
    if width > 1:
        with pytest.raises(ValueError, match=f"{width - 1} columns .* at most {width - 2}"):
            trees.check(width - 2)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(trees=draft_trees(), num_draft_tokens=st.integers(0, 9))
def test_truncated_trees_are_valid_prefixes(trees: DraftTree, num_draft_tokens: int) -> None:
    truncated = trees.truncated(num_draft_tokens)
    truncated.check(num_draft_tokens)
    width = truncated.tokens.shape[1]
    assert width == min(trees.tokens.shape[1], 1 + num_draft_tokens)
    assert torch.equal(truncated.tokens, trees.tokens[:, :width])
    assert torch.equal(truncated.parents, trees.parents[:, :width])
    assert torch.equal(truncated.tree_size, trees.tree_size.clamp(max=width))
    if width == trees.tokens.shape[1]:
        assert truncated is trees


@settings(derandomize=True, deadline=None, max_examples=150)
@given(trees=draft_trees())
def test_paths_and_previous_tokens_follow_the_parents(trees: DraftTree) -> None:
    batch, width = trees.tokens.shape
    of_roots = torch.arange(200, 200 + batch, dtype=torch.int32)
    previous = trees.previous_tokens(of_roots)
    assert torch.equal(previous[:, 0], of_roots)
    for row in range(batch):
        for column in range(1, width):
            path = trees.path(row, column)
            if trees.tokens[row, column] < 0:
                assert path == []
                continue
            above = trees.path(row, int(trees.parents[row, column]))
            assert path == [*above, int(trees.tokens[row, column])]
            root = int(trees.tokens[row, 0])
            assert previous[row, column] == (above[-1] if above else root)


GOOD = DraftTree(
    torch.tensor([[5, 6, 7, 8, -1]], dtype=torch.int32),
    torch.tensor([[-1, 0, 0, 1, -1]], dtype=torch.int32),
    torch.tensor([4], dtype=torch.int32),
)


@pytest.mark.parametrize(
    ("tokens", "parents", "size", "complaint"),
    [
        ([5, 6, 7, 8, -1], [0, 0, 0, 1, -1], 4, "the root's parent is 0 and must be -1"),
        ([-1, 6, -1, -1, -1], [-1, 0, -1, -1, -1], 4, "column 1 contains a node, but there is no"),
        ([5, 6, 7, 8, -1], [-1, 0, 0, 1, -1], 3, "tree_size is 3, but the last node is in"),
        ([5, 6, 7, 8, -1], [-1, 0, 0, 1, -1], 6, "tree_size is 6, but the last node is in"),
        ([5, -1, -1, -1, -1], [-1] * 5, 0, "tree_size is 0, but the last node is in column 0"),
        ([5, 6, 7, 8, -1], [-1, 2, 0, 1, -1], 4, "the parent of column 1 is 2, which is not an"),
        ([5, 6, 7, 8, -1], [-1, 0, 0, 3, -1], 4, "the parent of column 3 is 3, which is not an"),
        ([5, 6, 7, 8, -1], [-1, 0, 0, -1, -1], 4, "the parent of column 3 is -1, which is not an"),
        ([5, 6, -1, 8, -1], [-1, 0, -1, 2, -1], 4, "the parent of column 3 is 2, which is not an"),
        ([5, 6, 7, 8, -1], [-1, 0, 1, 0, -1], 4, "column 3 is shallower than column 2"),
        ([5, 6, 7, 7, -1], [-1, 0, 0, 0, -1], 4, "token 7 is drafted twice under column 0"),
        ([5, 6, 7, 8, -1], [-1, 0, 0, 1, 1], 4, "column 4 contains no node, so its parent must be"),
    ],
)
def test_trees_that_are_not_valid_are_refused(
    tokens: list[int], parents: list[int], size: int, complaint: str
) -> None:
    """The invalid tree is the second request's, which the message names."""
    wrong = DraftTree(
        torch.cat([GOOD.tokens, torch.tensor([tokens], dtype=torch.int32)]),
        torch.cat([GOOD.parents, torch.tensor([parents], dtype=torch.int32)]),
        torch.cat([GOOD.tree_size, torch.tensor([size], dtype=torch.int32)]),
    )
    GOOD.check()
    with pytest.raises(ValueError, match=f"request 1: .*{complaint}"):
        wrong.check()


@pytest.mark.parametrize(
    "wrong",
    [
        DraftTree(GOOD.tokens[0], GOOD.parents[0], GOOD.tree_size),
        DraftTree(GOOD.tokens, GOOD.parents[:, :4], GOOD.tree_size),
        DraftTree(GOOD.tokens, GOOD.parents, GOOD.tree_size[:0]),
        DraftTree(GOOD.tokens[:, :0], GOOD.parents[:, :0], GOOD.tree_size),
    ],
)
def test_wrong_shapes_are_refused(wrong: DraftTree) -> None:
    with pytest.raises(ValueError, match=r"must be \[B, N\], \[B, N\] and \[B\]"):
        wrong.check()


@pytest.mark.parametrize("name", ["tokens", "parents", "tree_size"])
def test_other_data_types_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be int32, not torch\.int64"):
        replace(GOOD, **{name: getattr(GOOD, name).long()}).check()


def test_trees_of_roots_have_no_drafts() -> None:
    trees = DraftTree.of_roots(torch.tensor([3, -1, 4], dtype=torch.int32))
    trees.check(0)
    assert not trees.drafted
    assert trees.tree_size.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("longest", "path"), [(1, [(0,)]), (2, [(0,), (0, 1)]), (9, [(0,), (0, 1), (0, 1, 0)])]
)
def test_the_first_path_of_a_static_tree(longest: int, path: list[tuple[int, ...]]) -> None:
    tree = StaticTree.from_paths([(0,), (2,), (0, 1), (0, 2), (2, 0), (0, 1, 0), (0, 2, 0)])
    assert list(tree.first_path(longest).paths) == path
