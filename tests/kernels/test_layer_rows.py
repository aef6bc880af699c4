"""What a layer reads of a step, compared with a loop over its rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import layer_rows as module
from tree_kernels.layer_rows import rows_to_read


def random_case(seed, sizes, prompts, depth, padding=0, dtype=torch.int32):
    """Requests with trees of `sizes` rows after `prompts` rows of a prompt; some verify nothing."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    counts = torch.tensor(sizes) + torch.tensor(prompts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    total = int(starts[-1]) + padding
    input_ids, positions = drawn(0, 90, total).to(dtype), drawn(0, 500, total)
    path = torch.full((len(sizes), depth + 1), -1, dtype=torch.int32)
    following = drawn(100, 190, len(sizes), depth + 1).int()
    for request, size in enumerate(sizes):
        verified = int(drawn(0, min(size, depth + 1) + 1))
        # A path may take any nodes in ascending order.
        nodes = 1 + torch.randperm(size - 1, generator=generator)[: max(verified - 1, 0)]
        path[request, :verified] = torch.cat((torch.zeros(1), nodes.sort().values)).int()[:verified]
    return input_ids, positions, starts, torch.tensor(sizes, dtype=torch.int32), path, following


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return random_case(
        draw(st.integers(0, 99)),
        sizes,
        [draw(st.sampled_from([0, 0, 1, 30])) for _ in sizes],
        draw(st.integers(0, 6)),
        draw(st.sampled_from([0, 1, 5])),
        draw(st.sampled_from([torch.int32, torch.int64])),
    )


def by_hand(input_ids, positions, starts, sizes, path, following):
    tokens, positions = input_ids.tolist(), positions.tolist()
    later = [*tokens[1:], tokens[0]]
    sources, last = [*range(len(tokens))], []
    ends = starts.tolist()[1:]
    roots = [end - size for end, size in zip(ends, sizes.tolist(), strict=True)]
    moved = [*positions]
    for request, (root, end) in enumerate(zip(roots, ends, strict=True)):
        nodes = [node for node in path[request].tolist() if node >= 0] or [0]
        for column in range(end - root):
            moved[root + column] = positions[root] + column
        for column, node in enumerate(nodes):
            sources[root + column] = root + node
            later[root + column] = int(following[request, column])
        last.append(root + len(nodes) - 1)
    return sources, later, moved, last


@CASES
@given(cases())
def test_the_rows_are_those_of_a_loop(case):
    found = rows_to_read(*case)
    assert tuple(each.tolist() for each in found) == by_hand(*case)
    assert found.tokens.dtype == case[0].dtype
    assert found.sources.dtype == found.positions.dtype == found.last.dtype == torch.int64


@CASES
@given(cases())
def test_the_kernel_reads_the_same_rows(interpreter, case):
    for found, expected in zip(module._rows_triton(*case), rows_to_read(*case), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_the_kernel_reads_long_prompts_and_deep_trees(interpreter):
    case = random_case(1, [200, 1, 3], [700, 600, 0], 150, padding=300)
    for found, expected in zip(module._rows_triton(*case), rows_to_read(*case), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", range(6))
def test_shapes_that_do_not_fit_are_errors(wrong):
    case = [*random_case(0, [3, 2], [0, 4], 2)]
    case[wrong] = case[wrong][:-1]
    with pytest.raises(ValueError, match="expected"):
        rows_to_read(*case)


def test_other_integers_are_errors():
    *case, following = random_case(0, [3, 2], [0, 4], 2)
    with pytest.raises(ValueError, match="int64"):
        rows_to_read(*case, following.long())


@pytest.mark.cuda
def test_cuda_reads_the_same_rows():
    case = random_case(2, [12, 1, 5, 80], [0, 300, 0, 0], 8)
    expected = rows_to_read(*case)
    found = rows_to_read(*(each.cuda() for each in case))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)
