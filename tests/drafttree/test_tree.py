"""Static draft trees are breadth-first and prefix-closed, however they are built."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttree.tree import MAX_NODES, StaticTree


def check_invariants(tree: StaticTree) -> None:
    parents = tree.parents
    depths = [0]
    for node in range(1, tree.nodes + 1):
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
    nodes=st.integers(1, MAX_NODES),
    priors=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_budget_takes_the_most_probable_nodes(nodes: int, priors: list[float]) -> None:
    tree = StaticTree.from_budget(nodes, priors)
    check_invariants(tree)

    def probability(path: tuple[int, ...]) -> float:
        return prod(priors[rank] for rank in path)

    if tree.nodes < nodes:
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
