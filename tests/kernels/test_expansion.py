"""Dynamic trees, compared with expanding them node by node with sorted lists in Python."""

import pytest
import torch
from expansion_inputs import world
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import expanded, offered
from property_settings import CASES
from tree_kernels import expansion
from tree_kernels.bigrams import bigram_cells
from tree_kernels.candidates import BIGRAM_STATES, LONGEST, NUM_SOURCES, ROW_STATES, TOP
from tree_kernels.expansion import columns_of, expand_trees
from tree_kernels.ngrams import NgramIndex, extend_ngrams

CPU = torch.device("cpu")
SHAPES = st.sampled_from([(1, 4), (3, 3), (8, 2), (11, 3), (16, 4)])


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def expected(case, width, depth):
    priors = case.priors.tolist()
    lines = [
        expanded(*case.tables(row), text, priors, root, width, depth)
        for row, (text, root) in enumerate(zip(case.texts, case.roots.tolist(), strict=True))
    ]
    return [[[node[part] for node in line] for line in lines] for part in range(4)]


def lists(found):
    return [part.tolist() for part in (found.tokens, found.parents, found.sources, found.scores)]


@CASES
@given(
    st.integers(0, 99),
    SHAPES,
    st.sampled_from([4, 12]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([2, 32, 1024]),
    st.booleans(),
)
def test_levels_keep_the_nodes_of_highest_score(cpu_path, seed, shape, vocab, bigrams, cells, own):
    case = world(seed, vocab=vocab, bigram_cells=bigrams, cells=cells, own=own)
    found = expand_trees(*case.tensors(), *shape)
    assert found.tokens.shape == (3, columns_of(*shape))
    assert found.scores.dtype == torch.float32
    assert {found.tokens.dtype, found.parents.dtype, found.sources.dtype} == {torch.int32}
    assert lists(found) == expected(case, *shape)


@pytest.mark.parametrize(
    ("seed", "shape", "options"),
    [
        (0, (1, 3), {"added": (3,)}),
        (1, (16, 3), {"vocab": 4}),
        (2, (5, 3), {"bigram_cells": 1, "cells": 2}),
        (3, (17, 2), {"vocab": 5, "added": (0,)}),
        (4, (16, 3), {"own": True}),
    ],
)
def test_kernel_expands_the_same_trees(interpreter, seed, shape, options):
    case = world(seed, batch=2, **options)
    assert lists(expansion._expand_triton(*case.tensors(), *shape)) == expected(case, *shape)


@CASES
@given(st.integers(0, 99), st.sampled_from([1, 2, 4096]))
def test_every_node_is_a_candidate_of_its_parent_from_its_source(cpu_path, seed, cells):
    case = world(seed, cells=cells)
    found = expand_trees(*case.tensors(), 16, 3)
    for line, text in enumerate(case.texts):
        tokens, parents = found.tokens[line].tolist(), found.parents[line].tolist()
        for node in range(1, len(tokens)):
            if tokens[node] < 0:
                continue
            path, at = [], parents[node]
            while at >= 0:
                path, at = [tokens[at], *path], parents[at]
            path = text.tokens[:-1] + path
            source = found.sources[line, node].item()
            find_candidates = offered(*case.tables(line), text, path)
            assert find_candidates[tokens[node]] == source
            matched = source // (BIGRAM_STATES * ROW_STATES)
            if 1 <= matched <= LONGEST:
                gram = [*path[-matched:], tokens[node]]
                spans = (text.tokens[i : i + len(gram)] for i in range(len(text.tokens)))
                assert gram in spans
            above = found.scores[line, parents[node]]
            assert found.scores[line, node] == above * case.priors[source]


def texts_alone(text, cells=4096, room=100):
    """Empty tables, and one text."""
    ngrams = NgramIndex.of(1, room, cells, CPU)
    extend_ngrams(ngrams, torch.tensor([0]), int32([text]))
    empty = int32([[-1] * TOP] * 20), int32([[[-1] * (TOP + 2)]])
    priors = torch.full((NUM_SOURCES,), 0.5)
    return *empty, ngrams, priors, torch.tensor([0]), int32(text[-1:])


def test_a_repeated_text_is_continued(cpu_path, interpreter):
    verse = [3, 1, 4, 1, 5, 9, 2, 6, 8]
    case = texts_alone([*verse, 7, *verse[:3]])
    for run in (expand_trees, expansion._expand_triton):
        found = run(*case, 4, 5)
        line = found.tokens[0]
        assert line[line >= 0].tolist() == [4, 1, 5, 9, 2, 6]
        lengths = found.sources[0][line >= 0][1:] // (BIGRAM_STATES * ROW_STATES)
        assert lengths.tolist() == [3, 4, 5, 6, 6]
        assert found.scores[0][line >= 0].tolist() == [0.5**depth for depth in range(6)]


def test_a_match_ends_with_the_text(cpu_path):
    # The text ends after the 4, so the match cannot continue beyond it.
    case = texts_alone([4, 5, 4], room=3)
    assert expand_trees(*case, 2, 3).tokens[0].tolist() == [4, 5, -1, 4, -1, 5, -1]


def test_empty_tables_and_a_text_without_repetition_give_the_root_alone(cpu_path, interpreter):
    case = texts_alone(list(range(12)))
    for run in (expand_trees, expansion._expand_triton):
        found = run(*case, 4, 3)
        assert found.tokens.tolist() == [[11] + [-1] * 12]
        assert found.parents.tolist() == [[-1] * 13]
        assert found.scores.tolist() == [[1.0] + [0.0] * 12]
        assert not found.sources.any()


def test_candidates_of_probability_0_are_not_drafted(cpu_path):
    matrix, bigrams, ngrams, priors, slots, roots = world(5).tensors()
    found = expand_trees(matrix, bigrams, ngrams, torch.zeros_like(priors), slots, roots, 16, 4)
    assert (found.tokens >= 0).sum(1).tolist() == [1, 1, 1]


def test_roots_outside_the_vocabulary_have_no_row(cpu_path, interpreter):
    matrix = int32([[1] * TOP, [0] * TOP])
    bigrams = int32([[[-1] * (TOP + 2)]])
    ngrams = NgramIndex.of(3, 9, 16, CPU)
    slots = torch.tensor([0, 1, 2])
    extend_ngrams(ngrams, slots, int32([[1, 2], [1, 1 << 30], [-1, -1]]))
    roots = int32([2, 1 << 30, -1])
    priors = torch.full((NUM_SOURCES,), 0.5)
    for run in (expand_trees, expansion._expand_triton):
        found = run(matrix, bigrams, ngrams, priors, slots, roots, 3, 2)
        assert found.tokens.tolist() == [[root] + [-1] * 6 for root in roots.tolist()]


def test_of_equal_scores_the_earlier_parents_and_the_earlier_candidate_is_kept(
    cpu_path, interpreter
):
    rows = [[-1] * TOP for _ in range(9)]
    rows[0], rows[1], rows[2] = [2, 1, 3, 4, 5, 6, 7, 8], [3] * TOP, [4, 5] + [-1] * 6
    bigrams = int32([[[-1] * (TOP + 2)]])
    ngrams = NgramIndex.of(1, 9, 16, CPU)
    extend_ngrams(ngrams, torch.tensor([0]), int32([[0]]))
    priors = torch.ones(NUM_SOURCES)
    for run in (expand_trees, expansion._expand_triton):
        found = run(int32(rows), bigrams, ngrams, priors, torch.tensor([0]), int32([0]), 2, 3)
        assert found.tokens[0, :5].tolist() == [0, 2, 1, 4, 5]
        assert found.parents[0, :5].tolist() == [-1, 0, 0, 1, 1]


def test_an_empty_batch_gives_no_trees(cpu_path, interpreter):
    case = world(0, batch=0)
    for run in (expand_trees, expansion._expand_triton):
        found = run(*case.tensors(), 4, 2)
        assert {part.shape for part in vars(found).values()} == {(0, columns_of(4, 2))}


@CASES
@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_python_and_the_kernels_agree_on_the_cells_of_bigrams(previous, token):
    bigrams = torch.full((1, 64, TOP + 2), -1, dtype=torch.int32)
    place = bigram_cells(int32([previous]), int32([token]), 64)
    bigrams[0, place] = int32([previous, token, *range(TOP)])
    ngrams = NgramIndex.of(1, 4, 8, CPU)
    extend_ngrams(ngrams, torch.tensor([0]), int32([[previous, token]]))
    priors = torch.zeros(NUM_SOURCES)
    priors.view(-1, BIGRAM_STATES, ROW_STATES)[:, 1 : TOP + 1] = 0.5
    matrix = int32([[-1] * TOP])
    found = expand_trees(matrix, bigrams, ngrams, priors, torch.tensor([0]), int32([token]), TOP, 1)
    assert sorted(found.tokens[0, 1:].tolist()) == list(range(TOP))


def test_shapes_that_do_not_fit_are_errors():
    matrix, bigrams, ngrams, priors, slots, roots = world(0).tensors()
    with pytest.raises(ValueError, match="matrix"):
        expand_trees(matrix[:, :4], bigrams, ngrams, priors, slots, roots, 4, 2)
    for wrong in (bigrams[:, :3], bigrams[:, :0], bigrams[..., :4]):
        with pytest.raises(ValueError, match="bigrams"):
            expand_trees(matrix, wrong, ngrams, priors, slots, roots, 4, 2)
    with pytest.raises(ValueError, match="priors"):
        expand_trees(matrix, bigrams, ngrams, priors[1:], slots, roots, 4, 2)
    with pytest.raises(ValueError, match="slots"):
        expand_trees(matrix, bigrams, ngrams, priors, slots[1:], roots, 4, 2)


@pytest.mark.cuda
@pytest.mark.parametrize(("width", "depth"), [(1, 1), (16, 8), (32, 8), (64, 8)])
@pytest.mark.parametrize("vocab", [12, 300])
def test_cuda_agrees_with_the_cpu(width, depth, vocab):
    for seed in range(8):
        case = world(seed, vocab=vocab, length=500, cells=1 << 12, added=(400, 9, 9))
        found = expand_trees(*case.on("cuda"), width, depth)
        assert lists(found) == lists(expand_trees(*case.tensors(), width, depth))
