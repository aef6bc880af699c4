"""The best path of a dynamic tree: the most expected tokens."""

from __future__ import annotations

import random

import pytest
import torch
from tree_kernels.expansion import ExpandedTrees

from recycle_plugin.chains import best_paths


def random_trees(batch: int, columns: int, seed: int) -> ExpandedTrees:
    """Trees of random shape, in which scores never rise and some columns hold no node."""
    draw = random.Random(seed)
    rows = []
    for _ in range(batch):
        nodes = [(draw.randrange(100), -1, 0, 1.0)]
        for column in range(1, columns):
            parent = draw.choice([i for i in range(column) if nodes[i][3] > 0])
            score = nodes[parent][3] * draw.uniform(0.3, 1)
            there = draw.random() < 0.8
            nodes.append((draw.randrange(100), parent, column, score) if there else (-1, -1, 0, 0))
        rows.append(nodes)
    fields = zip(*(zip(*row, strict=True) for row in rows), strict=True)
    kinds = (torch.int32, torch.int32, torch.int32, torch.float32)
    return ExpandedTrees(
        *(torch.tensor(field, dtype=kind) for field, kind in zip(fields, kinds, strict=True))
    )


def expected_path(parents: list[int], scores: list[float], most: int) -> list[int]:
    """The columns of the best path by trying every node as its end."""
    best, worth = [0], 0.0
    for column in range(1, len(parents)):
        path, node = [], column
        while node > 0 and scores[node] > 0:
            path, node = [node, *path], parents[node]
        total = sum(scores[node] for node in path)
        if path and len(path) <= most and total > worth:
            best, worth = [0, *path], total
    return best


@pytest.mark.parametrize(("columns", "longest"), [(1, 3), (2, 3), (30, 4), (60, 9), (60, 2)])
def test_the_path_with_the_greatest_sum_of_scores(columns: int, longest: int) -> None:
    trees = random_trees(8, columns, seed=columns + longest)
    paths = best_paths(trees, longest)
    assert paths.tokens.shape == (8, longest + 1)
    for row in range(8):
        path = expected_path(trees.parents[row].tolist(), trees.scores[row].tolist(), longest)
        absent = longest + 1 - len(path)
        for name, missing in (("tokens", -1), ("sources", 0), ("scores", 0)):
            found, given = (getattr(each, name)[row] for each in (paths, trees))
            assert found.tolist() == [*given[path].tolist(), *[missing] * absent]
        assert paths.parents[row].tolist() == [*range(-1, len(path) - 1), *[-1] * absent]


def test_no_path_is_longer_than_may_be_drafted() -> None:
    scores = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    columns = torch.arange(4, dtype=torch.int32)[None]
    chain = ExpandedTrees(columns, columns - 1, columns, scores)
    assert best_paths(chain, 2).tokens.tolist() == [[0, 1, 2]]
