"""Verification along the target's tokens, compared with following the tree in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import accept
from tree_kernels.accept import accept_step, accept_walk


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def random_trees(seed, widths, vocab):
    """Trees over a small vocabulary, for long accepted paths and equal siblings."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(widths), max(max(widths), 1))
    tokens, parents = torch.full(shape, -1).int(), torch.full(shape, -1).int()
    for request, count in enumerate(widths):
        for node in range(count):
            tokens[request, node] = torch.randint(0, vocab, (1,), generator=generator)
            if node:
                start = max(0, node - 4)
                parents[request, node] = torch.randint(start, node, (1,), generator=generator)
    target = torch.randint(0, vocab, shape, dtype=torch.int32, generator=generator)
    return tokens, parents, int32(widths), target


@st.composite
def trees(draw):
    widths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    return random_trees(draw(st.integers(0, 99)), widths, draw(st.integers(1, 3)))


def child(tokens, parents, count, node, token):
    if node < 0:
        return -1
    fitting = [i for i in range(1, count) if parents[i] == node and tokens[i] == token]
    return fitting[0] if fitting else -1


def walked(tokens, parents, tree_size, target, max_depth):
    paths, emissions, counts = [], [], []
    lines = (tensor.tolist() for tensor in (tokens, parents, tree_size, target))
    for token, parent, count, truth in zip(*lines, strict=True):
        path, node = [], 0 if count else -1
        while node >= 0 and len(path) <= max_depth:
            path.append(node)
            node = child(token, parent, count, node, truth[node])
        padding = [-1] * (max_depth + 1 - len(path))
        paths.append(path + padding)
        emissions.append([truth[node] for node in path] + padding)
        counts.append(len(path))
    return [paths, emissions, counts]


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]


@CASES
@given(trees(), st.integers(0, 9))
def test_the_walk_follows_the_target(cpu_path, case, max_depth):
    found = accept_walk(*case, max_depth)
    assert {tensor.dtype for tensor in found} == {torch.int32}
    assert lists(found) == walked(*case, max_depth)


@CASES
@given(trees(), st.integers(0, 9))
def test_kernel_walks_the_same_way(interpreter, case, max_depth):
    found = accept._walk_triton(*case, max_depth)
    assert lists(found) == lists(accept_walk(*case, max_depth))


@CASES
@given(trees(), st.integers(0, 9), st.integers(0, 99), st.sampled_from([torch.int32, torch.int64]))
def test_the_targets_tokens_are_found_by_row(cpu_path, interpreter, case, max_depth, seed, dtype):
    *given_trees, target = case
    shuffled = torch.randperm(target.numel(), generator=torch.Generator().manual_seed(seed))
    rows = shuffled.argsort().view_as(target)
    arguments = *given_trees, target.flatten()[shuffled].to(dtype), max_depth, rows
    for run in (accept_walk, accept._walk_triton):
        found = run(*arguments)
        assert {tensor.dtype for tensor in found} == {torch.int32}
        assert lists(found) == walked(*case, max_depth)


@CASES
@given(trees(), st.data())
def test_a_step_finds_the_first_child_with_the_token(cpu_path, case, data):
    tokens, parents, tree_size, _ = case
    nodes = data.draw(st.lists(st.integers(-1, 5), min_size=len(tokens), max_size=len(tokens)))
    drawn = data.draw(st.lists(st.integers(-1, 3), min_size=len(tokens), max_size=len(tokens)))
    found = accept_step(tokens, parents, tree_size, int32(nodes), int32(drawn))
    lines = zip(*lists(case[:3]), nodes, drawn, strict=True)
    assert found.dtype == torch.int32
    assert found.tolist() == [child(*line) for line in lines]


@CASES
@given(trees(), st.integers(-1, 5), st.integers(-1, 3))
def test_kernel_steps_the_same_way(interpreter, case, node, token):
    given_node, drawn = torch.full_like(case[2], node), torch.full_like(case[2], token)
    found = accept._step_triton(*case[:3], given_node, drawn)
    assert found.tolist() == accept_step(*case[:3], given_node, drawn).tolist()


def test_steps_along_the_targets_tokens_make_the_walk(cpu_path):
    tokens, parents, tree_size, target = random_trees(5, [40] * 20, 2)
    path, emitted, num_emitted = accept_walk(tokens, parents, tree_size, target, 6)
    assert num_emitted.max() > 3
    for depth in range(6):
        found = accept_step(tokens, parents, tree_size, path[:, depth], emitted[:, depth])
        assert found.tolist() == path[:, depth + 1].tolist()


def test_a_second_child_is_accepted_and_the_first_of_equal_siblings(cpu_path):
    tokens, parents = int32([[5, 7, 8, 8, 9, 9]]), int32([[-1, 0, 0, 0, 2, 3]])
    target = int32([[8, 0, 9, 1, 4, 6]])
    found = accept_walk(tokens, parents, int32([6]), target, 3)
    assert lists(found) == [[[0, 2, 4, -1]], [[8, 9, 4, -1]], [3]]


def test_shapes_that_do_not_fit_are_errors():
    tokens, parents, tree_size, target = random_trees(0, [3, 4], 2)
    with pytest.raises(ValueError, match="both be"):
        accept_walk(tokens, parents[:, :2], tree_size, target, 1)
    with pytest.raises(ValueError, match="target"):
        accept_walk(tokens, parents, tree_size, target[:, :2], 1)
    with pytest.raises(ValueError, match="max_depth"):
        accept_walk(tokens, parents, tree_size, target, -1)
    with pytest.raises(ValueError, match="rows"):
        accept_walk(tokens, parents, tree_size, target.flatten(), 1, target[0])
    with pytest.raises(ValueError, match="tree_size"):
        accept_step(tokens, parents, tree_size[:1], tree_size, tree_size)
    with pytest.raises(ValueError, match="sampled"):
        accept_step(tokens, parents, tree_size, tree_size, tree_size[:1])


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "width"), [(1, 16), (8, 81), (200, 81), (3, 300)])
def test_cuda_agrees_with_the_cpu(requests, width):
    case = random_trees(0, [max(1, width - i) for i in range(requests)], 2)
    on_device = [tensor.cuda() for tensor in case]
    found = accept_walk(*on_device, 8)
    assert lists(found) == lists(accept_walk(*case, 8))
    step = accept_step(*on_device[:3], found[0][:, 0], found[1][:, 0])
    assert step.tolist() == found[0][:, 1].tolist()
