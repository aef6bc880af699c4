"""Dynamic trees, compared with expanding them node by node with sorted lists in Python."""

from dataclasses import replace

import pytest
import torch
from expansion_inputs import world
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import expanded
from property_settings import CASES
from tree_kernels import expansion
from tree_kernels.bigrams import bigram_cells
from tree_kernels.candidates import BIGRAM_STATES, NUM_SOURCES, ROW_STATES, TOP, CandidateTables
from tree_kernels.copies import BUCKETS, LENGTHS
from tree_kernels.expansion import ExpandedTrees, columns_of, expand_trees
from tree_kernels.memory import TextMemory, remember
from tree_kernels.ngrams import NgramIndex, extend_ngrams

CPU = torch.device("cpu")
SHAPES = st.sampled_from([(1, 4, 0), (3, 3, 5), (8, 2, 0), (11, 3, 20), (16, 4, 56)])


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def expected(case, *shape):
    priors = case.candidates.priors.tolist()
    lines = [
        expanded(case.tables(row), text, case.memory, priors, root, *shape)
        for row, (text, root) in enumerate(zip(case.texts, case.roots.tolist(), strict=True))
    ]
    return [[[node[part] for node in line] for line in lines] for part in range(4)]


def lists(found):
    return [part.tolist() for part in (found.tokens, found.parents, found.sources, found.scores)]


def check(found, parts):
    assert lists(found)[:3] == parts[:3]
    # Products along a spine may be rounded otherwise.
    torch.testing.assert_close(found.scores, torch.tensor(parts[3]))


@CASES
@given(
    st.integers(0, 99),
    SHAPES,
    st.sampled_from([4, 12]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([2, 32, 1024]),
    st.sampled_from([0, 16, 256]),
    st.booleans(),
    st.booleans(),
)
def test_levels_keep_the_nodes_of_highest_score(
    cpu_path, seed, shape, vocab, bigrams, cells, places, own, sure
):
    case = world(
        seed, vocab=vocab, bigram_cells=bigrams, cells=cells, places=places, own=own, sure=sure
    )
    found = expand_trees(*case.tensors(), *shape)
    assert found.tokens.shape == (3, columns_of(*shape))
    assert found.scores.dtype == torch.float32
    assert {found.tokens.dtype, found.parents.dtype, found.sources.dtype} == {torch.int32}
    check(found, expected(case, *shape))


@pytest.mark.parametrize(
    ("seed", "shape", "options"),
    [
        (0, (1, 3, 0), {"added": (3,)}),
        (1, (16, 3, 8), {"vocab": 4}),
        (2, (5, 3, 56), {"bigram_cells": 1, "cells": 2, "sure": True}),
        (3, (17, 2, 0), {"vocab": 5, "added": (0,), "places": 0}),
        (4, (16, 3, 20), {"own": True, "sure": True}),
    ],
)
def test_kernel_expands_the_same_trees(interpreter, seed, shape, options):
    case = world(seed, batch=2, **options)
    check(expand_in_triton(*case.tensors(), *shape), expected(case, *shape))


def copy_state(source):
    return source // (BIGRAM_STATES * ROW_STATES)


def texts_alone(text, remembered=(), prior=0.5, cells=4096, room=100):
    """Empty tables, one text, and what the memory has of finished texts."""
    ngrams = NgramIndex.of(1, room, cells, CPU)
    extend_ngrams(ngrams, torch.tensor([0]), int32([text]))
    memory = TextMemory.of(1 << 12 if remembered else 0, CPU)
    for each in remembered:
        remember(memory, int32(each))
    row = int32([-1] * (TOP + 2))
    priors = torch.full((NUM_SOURCES,), prior)
    tables = CandidateTables(
        int32([[-1] * TOP] * 20), row[None], row[None, None], ngrams, memory, priors
    )
    return tables, torch.tensor([0]), int32(text[-1:])


def expand_in_triton(tables, slots, roots, width, depth, spine):
    trees = ExpandedTrees.empty(len(roots), columns_of(width, depth, spine), CPU)
    expansion._expand_triton(tables, slots, roots, width, depth, spine, trees)
    return trees


def test_unlikely_nodes_have_no_children(cpu_path, interpreter):
    """With a probability of 1/4 for each, those of level 5 still have the least score of a parent,
    1/1024."""
    case = texts_alone([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], prior=0.25)
    for run in (expand_trees, expand_in_triton):
        found = run(*case, 2, 8, 0)
        assert found.tokens[0][found.tokens[0] >= 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert found.scores[0].max() == 1
        assert found.scores[0][found.scores[0] > 0].min() == 0.25**6


def test_a_repeated_text_is_continued(cpu_path, interpreter):
    verse = [3, 1, 4, 1, 5, 9, 2, 6, 8]
    case = texts_alone([*verse, 7, *verse[:3]])
    for run in (expand_trees, expand_in_triton):
        found = run(*case, 4, 5, 0)
        best = found.scores[0] == 0.5 ** torch.arange(6)[:, None]
        assert [found.tokens[0][level].tolist()[0] for level in best] == [4, 1, 5, 9, 2, 6]
        states = [copy_state(found.sources[0][level])[0] for level in best[1:]]
        assert [LENGTHS[state - 1] for state in states] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("where", ["text", "memory"])
def test_a_long_copy_goes_on_as_a_spine(cpu_path, interpreter, where):
    poem = list(range(1, 70))
    text, remembered = ([*poem, 99, *poem[:5]], ()) if where == "text" else (poem[:5], [poem])
    case = texts_alone(text, remembered, prior=0.98)
    for run in (expand_trees, expand_in_triton):
        found = run(*case, 4, 8, 56)
        chain = found.tokens[0][found.tokens[0] >= 0]
        assert chain.tolist() == poem[4:]
        assert found.parents[0, -56:].tolist() == [
            at - 1 if at > columns_of(4, 8) else columns_of(4, 7)
            for at in range(columns_of(4, 8), columns_of(4, 8, 56))
        ]
        states = copy_state(found.sources[0][found.tokens[0] >= 0][1:]) - 1
        # After a match of d tokens the node at depth d + 1 follows one of d + 5 tokens.
        lengths = torch.arange(5, 69).clamp(max=64)
        bounds = torch.tensor(LENGTHS)
        source = 0 if where == "text" else BUCKETS
        assert torch.equal(states - source, torch.bucketize(lengths, bounds, right=True) - 1)


def test_a_spine_ends_where_its_score_falls_below_the_least(cpu_path, interpreter):
    poem = list(range(1, 70))
    case = texts_alone([*poem, 99, *poem[:5]], prior=0.9)
    for run in (expand_trees, expand_in_triton):
        scores = run(*case, 4, 8, 56).scores[0]
        assert scores[scores > 0].min() >= 0.2
        assert int((scores > 0).sum()) == 16  # 0.9 ** 15 is the last above 0.2


def test_a_period_is_copied_beyond_the_end_of_the_text(cpu_path, interpreter):
    case = texts_alone([7, 4, 5, 6, 4, 5, 6], prior=0.97)
    for run in (expand_trees, expand_in_triton):
        found = run(*case, 1, 8, 20)
        assert found.tokens[0].tolist() == [6, *[4, 5, 6] * 9, 4]


def test_up_to_three_copies_are_drafted_longest_match_first(cpu_path, interpreter):
    # After 21 22 23 came 10, after 22 23 came 11, after 23 came 12 and then 13.
    text = [21, 22, 23, 10, 9, 22, 23, 11, 9, 23, 12, 8, 23, 13, 5, 21, 22, 23]
    for remembered, wanted in (((), [10, 11, 13]), ([[*text[-4:], 15]], [15, 10, 11])):
        case = texts_alone(text, remembered)
        for run in (expand_trees, expand_in_triton):
            found = run(*case, 8, 1, 0)
            assert [token for token in found.tokens[0, 1:].tolist() if token >= 0] == wanted
            first, *others = copy_state(found.sources[0, 1:4]).tolist()
            assert 1 <= first <= 2 * BUCKETS
            assert all(2 * BUCKETS < other <= 4 * BUCKETS for other in others)


def test_rows_of_the_request_come_before_shared_ones(cpu_path, interpreter):
    case = world(3, batch=2, vocab=12, places=0, own=True)
    alone = replace(case.candidates, own=case.candidates.own[:1] * 0 - 1)
    for run in (expand_trees, expand_in_triton):
        shared = run(alone, *case.tensors()[1:], 16, 3, 0)
        assert lists(run(*case.tensors(), 16, 3, 0)) == expected(case, 16, 3, 0)
        assert lists(shared) != expected(case, 16, 3, 0)


def test_empty_tables_and_a_text_without_repetition_give_the_root_alone(cpu_path, interpreter):
    case = texts_alone(list(range(12)))
    for run in (expand_trees, expand_in_triton):
        found = run(*case, 4, 3, 0)
        assert found.tokens.tolist() == [[11] + [-1] * 12]
        assert found.parents.tolist() == [[-1] * 13]
        assert found.scores.tolist() == [[1.0] + [0.0] * 12]
        assert not found.sources.any()


def test_candidates_of_probability_0_are_not_drafted(cpu_path):
    tables, slots, roots = world(5).tensors()
    tables = replace(tables, priors=torch.zeros_like(tables.priors))
    found = expand_trees(tables, slots, roots, 16, 4, 20)
    assert (found.tokens >= 0).sum(1).tolist() == [1, 1, 1]


def test_roots_outside_the_vocabulary_have_no_row(cpu_path, interpreter):
    tables = texts_alone([0])[0]
    ngrams = NgramIndex.of(3, 9, 16, CPU)
    slots = torch.tensor([0, 1, 2])
    extend_ngrams(ngrams, slots, int32([[1, 2], [1, 1 << 30], [-1, -1]]))
    roots = int32([2, 1 << 30, -1])
    tables = replace(tables, ngrams=ngrams, matrix=int32([[1] * TOP, [0] * TOP]))
    for run in (expand_trees, expand_in_triton):
        found = run(tables, slots, roots, 3, 2, 0)
        assert found.tokens.tolist() == [[root] + [-1] * 6 for root in roots.tolist()]


def test_a_root_of_no_token_has_no_tree(cpu_path, interpreter):
    # The text repeats, so a root would have copies.
    tables, slots, _ = texts_alone([1, 2, 1, 2, 1, 2])
    for run in (expand_trees, expand_in_triton):
        assert (run(tables, slots, int32([-1]), 3, 2, 8).tokens < 0).all()


def test_of_equal_scores_the_earlier_parents_and_the_earlier_candidate_is_kept(
    cpu_path, interpreter
):
    rows = [[-1] * TOP for _ in range(9)]
    rows[0], rows[1], rows[2] = [2, 1, 3, 4, 5, 6, 7, 8], [3] * TOP, [4, 5] + [-1] * 6
    tables, slots, roots = texts_alone([0], prior=1.0)
    tables = replace(tables, matrix=int32(rows))
    for run in (expand_trees, expand_in_triton):
        found = run(tables, slots, roots, 2, 3, 0)
        assert found.tokens[0, :5].tolist() == [0, 2, 1, 4, 5]
        assert found.parents[0, :5].tolist() == [-1, 0, 0, 1, 1]


def test_an_empty_batch_gives_no_trees(cpu_path, interpreter):
    case = world(0, batch=0)
    for run in (expand_trees, expand_in_triton):
        found = run(*case.tensors(), 4, 2, 8)
        assert {part.shape for part in vars(found).values()} == {(0, columns_of(4, 2, 8))}


@CASES
@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_python_and_the_kernels_agree_on_the_cells_of_bigrams(previous, token):
    bigrams = torch.full((64, TOP + 2), -1, dtype=torch.int32)
    place = bigram_cells(int32([previous]), int32([token]), 64)
    bigrams[place] = int32([previous, token, *range(TOP)])
    tables, slots, roots = texts_alone([previous, token])
    priors = torch.zeros(NUM_SOURCES)
    priors.view(-1, BIGRAM_STATES, ROW_STATES)[:, 1 : TOP + 1] = 0.5
    tables = replace(tables, bigrams=bigrams, priors=priors)
    found = expand_trees(tables, slots, roots, TOP, 1)
    assert sorted(found.tokens[0, 1:].tolist()) == list(range(TOP))


def test_memory_can_be_used_again(cpu_path, interpreter):
    memory = ExpandedTrees.empty(3, columns_of(4, 2, 8), CPU)
    for seed in range(2):
        case = world(seed)
        found = expand_trees(*case.tensors(), 4, 2, 8, memory)
        assert found is memory
        assert lists(found) == expected(case, 4, 2, 8)


def test_shapes_that_do_not_fit_are_errors():
    tables, slots, roots = world(0).tensors()
    with pytest.raises(ValueError, match="into has"):
        expand_trees(tables, slots, roots, 4, 2, into=ExpandedTrees.empty(3, 4, CPU))
    with pytest.raises(ValueError, match="matrix"):
        expand_trees(replace(tables, matrix=tables.matrix[:, :4]), slots, roots, 4, 2)
    for name in ("bigrams", "own"):
        right = getattr(tables, name)
        wrong = right[..., :4], right[..., :0, :], torch.cat((right, right, right), -2)
        for table in wrong:
            with pytest.raises(ValueError, match=name):
                expand_trees(replace(tables, **{name: table}), slots, roots, 4, 2)
    with pytest.raises(ValueError, match="priors"):
        expand_trees(replace(tables, priors=tables.priors[1:]), slots, roots, 4, 2)
    with pytest.raises(ValueError, match="slots"):
        expand_trees(tables, slots[1:], roots, 4, 2)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("width", "depth", "spine"), [(1, 1, 0), (16, 8, 56), (32, 8, 7), (64, 8, 56)]
)
@pytest.mark.parametrize("vocab", [12, 300])
def test_cuda_agrees_with_the_cpu(width, depth, spine, vocab):
    for seed in range(8):
        options = {"length": 500, "cells": 1 << 12, "added": (400, 9, 9), "places": 1 << 12}
        case = world(seed, vocab=vocab, sure=seed % 2 == 0, **options)
        found = expand_trees(*case.on("cuda"), width, depth, spine)
        here = expand_trees(*case.tensors(), width, depth, spine)
        check(ExpandedTrees(*(part.cpu() for part in vars(found).values())), lists(here))
