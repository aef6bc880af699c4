"""Depths and ancestor masks, compared with following the parents in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from random_parents import random_trees
from tree_kernels import mask
from tree_kernels.mask import depths, tree_mask


@st.composite
def trees(draw):
    widths = draw(st.lists(st.integers(1, 40) | st.just(67), min_size=1, max_size=4))
    kind = draw(st.sampled_from(["chain", "star", "any"]))
    return random_trees(draw(st.integers(0, 99)), widths, kind)


def lineages(parents, tree_size):
    """The set of each node and its ancestors, empty for padding."""
    for line, count in zip(parents.tolist(), tree_size.tolist(), strict=True):
        request = []
        for node in range(len(line)):
            seen = set()
            while 0 <= node < count:
                seen.add(node)
                node = line[node]
            request.append(seen)
        yield request


@CASES
@given(trees())
def test_masks_and_depths_follow_the_parents(cpu_path, case):
    width = case[0].shape[1]
    expected = list(lineages(*case))
    found = tree_mask(*case)
    assert found.dtype == torch.bool
    assert found.tolist() == [
        [[j in seen for j in range(width)] for seen in request] for request in expected
    ]
    assert depths(*case).tolist() == [
        [max(len(seen) - 1, 0) for seen in request] for request in expected
    ]


@CASES
@given(trees())
def test_kernels_give_the_same(interpreter, case):
    assert mask._depths_triton(*case).tolist() == depths(*case).tolist()
    seen = mask._tree_mask_triton(*case)
    assert seen.dtype == torch.bool
    assert seen.tolist() == tree_mask(*case).tolist()


@pytest.mark.parametrize("width", [1, 2, 3, 31, 32, 33, 64, 65])
def test_a_chain_of_any_length_sees_all_before_it(cpu_path, interpreter, width):
    case = random_trees(0, [width], "chain")
    assert torch.equal(tree_mask(*case)[0], torch.ones(width, width).tril().bool())
    assert mask._tree_mask_triton(*case).tolist() == tree_mask(*case).tolist()
    assert mask._depths_triton(*case).tolist() == [list(range(width))]


def test_columns_past_the_tree_size_are_padding(cpu_path):
    parents = torch.tensor([[-1, 0, 1, 2]], dtype=torch.int32)
    count = torch.tensor([2], dtype=torch.int32)
    assert depths(parents, count).tolist() == [[0, 1, 0, 0]]
    assert tree_mask(parents, count).int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    ]


def test_shapes_that_do_not_fit_are_errors():
    parents, count = random_trees(0, [3, 4], "any")
    for function in (depths, tree_mask):
        with pytest.raises(ValueError, match="must be"):
            function(parents, count[:1])


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "width"), [(1, 16), (8, 81), (64, 81), (3, 300)])
def test_cuda_agrees_with_the_cpu(requests, width):
    case = random_trees(0, [max(1, width - 3 * i) for i in range(requests)], "any")
    on_device = [tensor.cuda() for tensor in case]
    for function in (depths, tree_mask):
        assert torch.equal(function(*on_device).cpu(), function(*case))
