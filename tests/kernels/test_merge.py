"""The union of two trees, compared with the union of their sets of paths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import merge as module
from tree_kernels.merge import merge_trees

DEPTH = 4


def random_tree(draw, width):
    """A random tree in breadth-first order: tokens and parents padded to `width`, and its size."""
    paths = [()]
    for _ in range(draw(st.integers(0, width - 1))):
        parent = draw(st.sampled_from([path for path in paths if len(path) < DEPTH]))
        child = (*parent, draw(st.integers(0, 3)))
        if child not in paths:
            paths.append(child)
    order = []
    level = [()]
    while level:
        order += level
        level = [path for parent in level for path in paths if path[:-1] == parent and path]
    pad = [-1] * (width - len(order))
    tokens = [7, *(path[-1] for path in order[1:])]
    parents = [-1, *(order.index(path[:-1]) for path in order[1:])]
    return tokens + pad, parents + pad, len(order)


@st.composite
def pairs(draw):
    requests = draw(st.integers(1, 3))
    sides = []
    for _ in range(2):
        width = draw(st.integers(1, 9))
        trees = [random_tree(draw, width) for _ in range(requests)]
        sides.append(
            tuple(torch.tensor(part, dtype=torch.int32) for part in zip(*trees, strict=True))
        )
    return sides


def paths_of(tree, row):
    """The path of each node, in the order of the nodes."""
    tokens, parents, tree_size = (part[row].tolist() for part in tree)
    assert tokens[tree_size:] == parents[tree_size:] == [-1] * (len(tokens) - tree_size)
    paths = [()]
    for token, parent in zip(tokens[1:tree_size], parents[1:tree_size], strict=True):
        paths.append((*paths[parent], token))
    return paths


@CASES
@given(pairs())
def test_the_union_breadth_first(cpu_path, pair):
    merged = merge_trees(*pair, DEPTH)
    for row in range(len(merged[2])):
        assert merged[0][row, 0] == 7
        found = paths_of(merged, row)
        first, second = (paths_of(tree, row) for tree in pair)
        assert set(found) == {*first, *second}
        assert len(found) == len(set(found))
        assert [len(path) for path in found] == sorted(len(path) for path in found)
        assert [path for path in found if path in first] == first
        order = [found.index(path[:-1]) for path in found[1:]]
        assert order == sorted(order)


@CASES
@given(pairs())
def test_cpp_gives_the_same_as_the_reference(pair):
    expected = module._merge_reference(*pair, DEPTH)
    for ours, other in zip(module._merge_cpp(*pair, DEPTH), expected, strict=True):
        assert ours.dtype == other.dtype
        assert torch.equal(ours, other)


@CASES
@given(pairs())
def test_the_kernel_gives_the_same(interpreter, pair):
    merged = merge_trees(*pair, DEPTH)
    for ours, expected in zip(module._merge_triton(*pair, DEPTH), merged, strict=True):
        assert torch.equal(ours, expected)


def test_an_empty_batch_gives_no_trees(cpu_path):
    none = torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    tree = (*none, torch.zeros(0, dtype=torch.int32))
    assert [tuple(part.shape) for part in merge_trees(tree, tree, DEPTH)] == [(0, 5), (0, 5), (0,)]


def test_shapes_that_do_not_fit_are_errors():
    tree = (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2))
    for other in (
        (torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1)),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1)),
        (torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2)),
    ):
        with pytest.raises(ValueError, match="expected"):
            merge_trees(tree, other, DEPTH)


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu():
    generator = torch.Generator().manual_seed(0)
    requests, width = 64, 81
    tokens = torch.randint(0, 99, (requests, width), generator=generator, dtype=torch.int32)
    parents = torch.arange(-1, width - 1, dtype=torch.int32).clamp(max=9).expand(requests, -1)
    tree_size = torch.randint(1, width + 1, (requests,), generator=generator, dtype=torch.int32)
    pair = [(tokens, parents, tree_size), (tokens.flip(0), parents, tree_size.flip(0))]
    found = merge_trees(*(tuple(part.cuda() for part in tree) for tree in pair), depth=12)
    for ours, expected in zip(found, merge_trees(*pair, depth=12), strict=True):
        assert torch.equal(ours.cpu(), expected)
