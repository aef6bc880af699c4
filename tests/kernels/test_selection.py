"""The nodes of highest score of dynamic trees, compared with sorting them in Python."""

import pytest
import torch
from expansion_inputs import world
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import best_nodes as plain_best
from property_settings import CASES
from tree_kernels import selection
from tree_kernels.expansion import ExpandedTrees, columns_of, expand_trees
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
    return ExpandedTrees(tokens.int(), parents.int(), sources.int(), scores.float()), lines


def expected(lines, num_draft_tokens, spine=0, min_score=0.0, by_score=False):
    best = [plain_best(line, num_draft_tokens, spine, min_score, by_score) for line in lines]
    columns = num_draft_tokens + spine + 1
    padded = [line + [(-1, -1, 0)] * (columns - len(line)) for line in best]
    return [
        *([[node[part] for node in line] for line in padded] for part in range(3)),
        [len(line) for line in best],
    ]


@st.composite
def trees(draw):
    width, depth = draw(st.sampled_from([(1, 3), (5, 2), (16, 4)]))
    case = random_trees(draw(st.integers(0, 99)), draw(st.integers(1, 4)), width, depth)
    nodes = draw(st.integers(0, columns_of(width, depth) - 1))
    spine = draw(st.integers(0, columns_of(width, depth) - 1 - nodes))
    return *case, nodes, spine, draw(st.sampled_from([0.0, 0.25, 0.375, 0.9]))


def lists(found):
    return [part.tolist() for part in found]


@CASES
@given(trees())
def test_the_nodes_of_highest_score_are_selected(cpu_path, case):
    expanded, lines, *size = case
    found = best_nodes(expanded, *size)
    assert {part.dtype for part in found} == {torch.int32}
    assert lists(found) == expected(lines, *size)
    found = best_nodes(expanded, *size, by_score=True)
    assert lists(found) == expected(lines, *size, by_score=True)


@pytest.mark.parametrize(("width", "depth"), [(1, 2), (5, 3), (16, 4)])
def test_kernel_keeps_the_same_nodes(interpreter, width, depth):
    expanded, lines = random_trees(width, 2, width, depth)
    for num_draft_tokens in {0, 2, columns_of(width, depth) // 2, columns_of(width, depth) - 1}:
        more = columns_of(width, depth) - 1 - num_draft_tokens
        for spine, min_score in ((0, 0.0), (more, 0.375), (more // 2, 0.1)):
            size = num_draft_tokens, spine, min_score
            for by_score in (False, True):
                found = selection._best_triton(expanded, *size, by_score)
                assert lists(found) == expected(lines, *size, by_score)


def test_on_a_gpu_trees_of_too_many_columns_for_the_kernel_are_sorted(monkeypatch):
    expanded, lines = random_trees(3, 2, 5, 3)
    monkeypatch.setattr(selection, "_MOST", expanded.tokens.shape[1] - 1)
    monkeypatch.setattr(selection, "_best_kernel", None)
    for by_score in (False, True):
        found = selection._best_triton(expanded, 4, 2, 0.1, by_score)
        assert lists(found) == expected(lines, 4, 2, 0.1, by_score)


def test_nodes_with_a_nan_score_are_dropped(cpu_path):
    expanded, _ = random_trees(4, 2, 5, 3)
    for line in range(2):
        lost = {int(expanded.scores[line, 1:].argmax()) + 1}
        for column, parent in enumerate(expanded.parents[line].tolist()):
            lost |= {column} if parent in lost else set()
        expanded.scores[line, [*lost]] = torch.nan
    tree_size = best_nodes(expanded, 6)[3]
    assert torch.equal(tree_size, 1 + (expanded.scores[:, 1:] > 0).sum(1).clamp(max=6).int())
    assert (tree_size > 1).any()


@CASES
@given(st.integers(0, 99), st.integers(0, 30))
def test_the_selection_is_a_tree_in_breadth_first_order_with_siblings_adjacent(
    cpu_path, seed, num_draft_tokens
):
    expanded = expand_trees(*world(seed).tensors(), 16, 4)
    for tokens, parents, _, count in zip(
        *lists(best_nodes(expanded, num_draft_tokens)), strict=True
    ):
        assert 1 <= count <= num_draft_tokens + 1
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:count], 1))
        # Parents are in order: one level after another, siblings adjacent.
        assert parents[1:count] == sorted(parents[1:count])
        assert min(tokens[:count]) >= 0
        assert tokens[count:] == parents[count:] == [-1] * (num_draft_tokens + 1 - count)
        children = list(zip(parents[:count], tokens[:count], strict=True))
        assert len(set(children)) == count


def test_a_larger_selection_contains_a_smaller_one(cpu_path):
    expanded = expand_trees(*world(6).tensors(), 16, 4)
    few, many = best_nodes(expanded, 6), best_nodes(expanded, 20)
    assert many[3].sum() > few[3].sum() > 3
    for line in range(3):
        paths = []
        for tokens, parents, _, counts in (few, many):
            found = [(tokens[line, 0].item(),)]
            for node in range(1, counts[line]):
                found.append((*found[parents[line, node]], tokens[line, node].item()))
            paths.append(set(found))
        assert paths[0] <= paths[1]


def test_a_tree_by_score_that_is_cut_keeps_its_best_nodes(cpu_path):
    expanded = expand_trees(*world(6).tensors(), 16, 4)
    many = best_nodes(expanded, 20, by_score=True)
    for num_draft_tokens in range(20):
        few = best_nodes(expanded, num_draft_tokens, by_score=True)
        for cut, chosen in zip(many[:3], few[:3], strict=True):
            assert cut[:, : num_draft_tokens + 1].tolist() == chosen.tolist()


def test_an_empty_batch_gives_no_nodes(cpu_path, interpreter):
    expanded = expand_trees(*world(0, batch=0).tensors(), 4, 2)
    for run in (best_nodes, selection._best_triton):
        assert [part.shape for part in run(expanded, 2, 1, 0.5)] == [(0, 4)] * 3 + [(0,)]


@pytest.mark.parametrize("by_score", [False, True])
def test_sources_are_written_into_the_lines_of_a_table(cpu_path, interpreter, by_score):
    expanded, _ = random_trees(3, 3, 5, 3)
    expected = best_nodes(expanded, 6, 2, 0.3, by_score=by_score)
    lines = torch.tensor([4, 0, 3])
    for run in (best_nodes, selection._best_triton):
        table = torch.full((5, 12), 7, dtype=torch.int32)
        *found, sources, tree_size = run(
            expanded, 6, 2, 0.3, by_score=by_score, into=(table, lines)
        )
        assert sources is table
        assert lists([*found, table[lines, :9], tree_size]) == lists(expected)
        assert table[[1, 2]].eq(7).all()
        assert table[:, 9:].eq(7).all()


def test_more_nodes_than_columns_are_an_error():
    expanded, _ = random_trees(0, 1, 4, 2)
    for size in ((-1, 0), (columns_of(4, 2), 0), (0, -1), (3, 6)):
        with pytest.raises(ValueError, match=r"num_draft_tokens=.* and 8 at most together"):
            best_nodes(expanded, *size)
    table = torch.zeros(2, 6, dtype=torch.int32), torch.tensor([0])
    with pytest.raises(ValueError, match="6 columns"):
        best_nodes(expanded, 4, 2, into=table)


@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "width", "depth"), [(1, 16, 8), (64, 16, 8), (4, 64, 8)])
def test_cuda_agrees_with_the_cpu(batch, width, depth):
    expanded, _ = random_trees(batch, batch, width, depth)
    there = ExpandedTrees(*(part.cuda() for part in vars(expanded).values()))
    for num_draft_tokens in (0, 60, columns_of(width, depth) - 1):
        size = num_draft_tokens, columns_of(width, depth) - 1 - num_draft_tokens, 0.3
        assert lists(best_nodes(there, *size)) == lists(best_nodes(expanded, *size))
