"""Static trees and their compaction, compared with filling them node by node in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import gather
from tree_kernels.gather import compact_tree, gather_tree


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def static_trees(draw, max_nodes=70):
    """Parents in breadth-first order, and the number of nodes of depth <= d for each d."""
    parents, ends, start = [-1], [1], 0
    for _ in range(draw(st.integers(0, 6))):
        level = range(start, len(parents))
        children = draw(st.lists(st.sampled_from(level), max_size=max_nodes // 5))
        if not children:
            break
        start = len(parents)
        parents += sorted(children)
        ends.append(len(parents))
    return parents, ends


@st.composite
def drafts(draw):
    parents, ends = draw(static_trees())
    vocab, k = draw(st.sampled_from([1, 5, 12, 37])), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    # The matrix also contains ids outside the vocabulary.
    matrix = torch.randint(0, vocab + 1, (vocab, k), dtype=torch.int32, generator=generator)
    matrix[torch.rand(vocab, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = -1
    ranks = [0] + [draw(st.integers(0, k - 1)) for _ in parents[1:]]
    roots = draw(st.lists(st.integers(-1, vocab), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return matrix, torch.tensor(roots, dtype=dtype), int32(parents), int32(ranks), ends


def gathered(matrix, roots, parents, ranks):
    rows, out = matrix.tolist(), []
    for root in roots.tolist():
        line = [root]
        for parent, rank in zip(parents.tolist()[1:], ranks.tolist()[1:], strict=True):
            above = line[parent]
            line.append(rows[above][rank] if 0 <= above < len(rows) else -1)
        out.append(line)
    return out


def compacted(tokens, parents):
    answer = []
    for i, line in enumerate(tokens.tolist()):
        above = parents.tolist() if parents.dim() == 1 else parents[i].tolist()
        kept = [node for node, token in enumerate(line) if token != -1]
        left = len(line) - len(kept)
        padding = [-1] * left
        new_parents = [kept.index(above[node]) if above[node] >= 0 else -1 for node in kept]
        new_tokens = [line[node] for node in kept] + padding
        answer.append((new_tokens, new_parents + padding, len(kept), kept + [0] * left))
    return [list(part) for part in zip(*answer, strict=True)]


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]


@CASES
@given(drafts())
def test_every_node_is_the_candidate_of_its_rank_in_its_parents_row(cpu_path, case):
    found = gather_tree(*case)
    assert found.dtype == torch.int32
    assert found.tolist() == gathered(*case[:4])


@CASES
@given(drafts())
def test_kernel_gathers_the_same_trees(interpreter, case):
    assert gather._gather_triton(*case).tolist() == gather_tree(*case).tolist()


@CASES
@given(drafts())
def test_compact_trees_keep_order_and_ancestry(cpu_path, case):
    tokens, parents = gather_tree(*case), case[2]
    expected = compacted(tokens, parents)
    found = compact_tree(tokens, parents)
    assert {tensor.dtype for tensor in found} == {torch.int32}
    assert lists(found) == expected
    again = compact_tree(found[0], found[1])
    assert lists(again)[:3] == expected[:3]


@CASES
@given(drafts())
def test_kernel_compacts_the_same_trees(interpreter, case):
    tokens, parents = gather_tree(*case), case[2]
    found = gather._compact_triton(tokens, parents)
    assert lists(found) == lists(compact_tree(tokens, parents))
    each = parents.repeat(tokens.shape[0], 1)
    assert lists(gather._compact_triton(tokens, each)) == lists(found)


def test_an_empty_row_ends_its_branch_alone(cpu_path):
    matrix = int32([[1, 2], [-1, -1], [0, 1]])
    parents, ranks = int32([-1, 0, 0, 1, 2]), int32([0, 0, 1, 0, 0])
    tokens = gather_tree(matrix, int32([0]), parents, ranks, [1, 3, 5])
    assert tokens.tolist() == [[0, 1, 2, -1, 0]]
    assert lists(compact_tree(tokens, parents)) == [
        [[0, 1, 2, 0, -1]],
        [[-1, 0, 0, 2, -1]],
        [4],
        [[0, 1, 2, 4, 0]],
    ]


def test_shapes_that_do_not_fit_are_errors():
    matrix, root = int32([[0, 0]]), int32([0])
    with pytest.raises(ValueError, match="both be"):
        gather_tree(matrix, root, int32([-1, 0]), int32([0]), [1, 2])
    with pytest.raises(ValueError, match="level_ends"):
        gather_tree(matrix, root, int32([-1, 0]), int32([0, 0]), [1])
    with pytest.raises(ValueError, match="contiguous"):
        gather_tree(matrix.repeat(2, 1).t(), root, int32([-1]), int32([0]), [1])
    with pytest.raises(ValueError, match="do not fit"):
        compact_tree(int32([[0, 0]]), int32([-1]))


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "vocab"), [(1, 32000), (8, 128256), (256, 49152)])
def test_cuda_agrees_with_the_cpu(requests, vocab):
    ends = [1, 9, 33, 65, 81]
    starts = [0, 0, 1, 9, 33]
    parents = [-1]
    for depth in range(1, 5):
        width = ends[depth - 1] - starts[depth]
        count = ends[depth] - ends[depth - 1]
        parents += [starts[depth] + i * width // count for i in range(count)]
    ranks = torch.randint(0, 8, (81,), dtype=torch.int32)
    matrix = torch.randint(0, vocab, (vocab, 8), dtype=torch.int32)
    matrix[torch.rand(vocab) < 0.2] = -1
    case = (matrix, torch.randint(0, vocab, (requests,)), int32(parents), ranks)
    tokens = gather_tree(*(tensor.cuda() for tensor in case), ends)
    assert tokens.tolist() == gather_tree(*case, ends).tolist()
    found = compact_tree(tokens, int32(parents).cuda())
    assert lists(found) == lists(compact_tree(tokens.cpu(), int32(parents)))
