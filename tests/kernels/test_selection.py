"""The nodes of highest score of dynamic trees, compared with sorting them in Python."""

import pytest
import torch
from growth_inputs import world
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import best_nodes as plain_best
from property_settings import CASES
from tree_kernels import selection
from tree_kernels.growth import Grown, columns_of, grow
from tree_kernels.selection import best_nodes


def random_trees(seed, batch, width, depth):
    """Expanded trees with many equal scores; each level's nodes come before its padding."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(high):
        return int(torch.randint(0, high, (1,), generator=generator))

    columns = columns_of(width, depth)
    lines = []
    for _ in range(batch):
        line, first = [(drawn(50), -1, 0, 1.0)], 0
        while len(line) < columns:
            room = min(8, width) if len(line) == 1 else width
            there = [i for i in range(first, len(line)) if line[i][3] > 0]
            parents = sorted(there[drawn(len(there))] for _ in range(drawn(room + 1)) if there)
            first = len(line)
            for parent in parents:
                score = line[parent][3] * (1 + drawn(4)) / 4
                line.append((drawn(50), parent, 1 + drawn(99), score))
            line += [(-1, -1, 0, 0.0)] * (first + room - len(line))
        lines.append(line)
    tokens, parents, sources, scores = (
        torch.tensor([[node[part] for node in line] for line in lines]) for part in range(4)
    )
    return Grown(tokens.int(), parents.int(), sources.int(), scores.float()), lines


def expected(lines, nodes):
    best = [plain_best(line, nodes) for line in lines]
    padded = [line + [(-1, -1, 0)] * (nodes + 1 - len(line)) for line in best]
    return [
        *([[node[part] for node in line] for line in padded] for part in range(3)),
        [len(line) for line in best],
    ]


@st.composite
def trees(draw):
    width, depth = draw(st.sampled_from([(1, 3), (5, 2), (16, 4)]))
    case = random_trees(draw(st.integers(0, 99)), draw(st.integers(1, 4)), width, depth)
    return *case, draw(st.integers(0, columns_of(width, depth) - 1))


def lists(found):
    return [part.tolist() for part in found]


@CASES
@given(trees())
def test_the_nodes_of_highest_score_are_selected(cpu_path, case):
    grown, lines, nodes = case
    found = best_nodes(grown, nodes)
    assert {part.dtype for part in found} == {torch.int32}
    assert lists(found) == expected(lines, nodes)


@pytest.mark.parametrize(("width", "depth"), [(1, 2), (5, 3), (16, 4)])
def test_kernel_keeps_the_same_nodes(interpreter, width, depth):
    grown, lines = random_trees(width, 2, width, depth)
    for nodes in {0, 2, columns_of(width, depth) // 2, columns_of(width, depth) - 1}:
        assert lists(selection._best_triton(grown, nodes)) == expected(lines, nodes)


@CASES
@given(st.integers(0, 99), st.integers(0, 30))
def test_the_selection_is_a_tree_in_breadth_first_order_with_siblings_adjacent(
    cpu_path, seed, nodes
):
    grown = grow(*world(seed).tensors(), 16, 4)
    for tokens, parents, _, count in zip(*lists(best_nodes(grown, nodes)), strict=True):
        assert 1 <= count <= nodes + 1
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:count], 1))
        # Parents are in order: one level after another, siblings adjacent.
        assert parents[1:count] == sorted(parents[1:count])
        assert min(tokens[:count]) >= 0
        assert tokens[count:] == parents[count:] == [-1] * (nodes + 1 - count)
        children = list(zip(parents[:count], tokens[:count], strict=True))
        assert len(set(children)) == count


def test_a_larger_selection_contains_a_smaller_one(cpu_path):
    grown = grow(*world(6).tensors(), 16, 4)
    few, many = best_nodes(grown, 6), best_nodes(grown, 20)
    assert many[3].sum() > few[3].sum() > 3
    for line in range(3):
        paths = []
        for tokens, parents, _, counts in (few, many):
            found = [(tokens[line, 0].item(),)]
            for node in range(1, counts[line]):
                found.append((*found[parents[line, node]], tokens[line, node].item()))
            paths.append(set(found))
        assert paths[0] <= paths[1]


def test_an_empty_batch_gives_no_nodes(cpu_path, interpreter):
    grown = grow(*world(0, batch=0).tensors(), 4, 2)
    for run in (best_nodes, selection._best_triton):
        assert [part.shape for part in run(grown, 3)] == [(0, 4)] * 3 + [(0,)]


def test_more_nodes_than_columns_are_an_error():
    grown, _ = random_trees(0, 1, 4, 2)
    for nodes in (-1, columns_of(4, 2)):
        with pytest.raises(ValueError, match=r"num_draft_tokens=-?[0-9]+ must be between 0 and 8"):
            best_nodes(grown, nodes)


@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "width", "depth"), [(1, 16, 8), (64, 16, 8), (4, 64, 8)])
def test_cuda_agrees_with_the_cpu(batch, width, depth):
    grown, _ = random_trees(batch, batch, width, depth)
    there = Grown(*(part.cuda() for part in vars(grown).values()))
    for nodes in (0, 60, columns_of(width, depth) - 1):
        assert lists(best_nodes(there, nodes)) == lists(best_nodes(grown, nodes))
