"""Whole trees of token-info sampling, compared with algorithm 1 over log-softmaxes."""

import pytest
import torch
from hot_tokens import random_hot_tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import token_tree as module
from tree_kernels.token_tree import expand_token_trees

FLOAT8 = torch.float8_e4m3fn


def random_case(seed, requests, length, width, vocab, hot, dtype=torch.float32, float8=False):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(requests, length, vocab, generator=generator)
    row_of, hot_tokens = random_hot_tokens(vocab, hot, generator)
    steps = torch.randint(0, length + 1, (requests,), generator=generator)
    roots = torch.randint(0, vocab, (requests,), generator=generator, dtype=torch.int32)
    table = torch.randn(hot, hot, generator=generator).to(FLOAT8 if float8 else dtype)
    return logits.to(dtype), steps, roots, table, row_of, hot_tokens, width


@st.composite
def cases(draw):
    vocab = draw(st.integers(2, 40) | st.just(2500))
    return random_case(
        draw(st.integers(0, 99)),
        requests=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 4)),
        width=draw(st.integers(1, min(vocab, 5))),
        vocab=vocab,
        hot=draw(st.integers(1, vocab)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        float8=draw(st.booleans()),
    )


def paths_of(tokens, parents, scores):
    """The scores of a tree's paths."""
    paths = {0: ()}
    for column in range(1, len(tokens)):
        if scores[column] > 0:
            paths[column] = (*paths[parents[column]], tokens[column])
    return {path: scores[column] for column, path in paths.items()}


def by_hand(logits, steps, root, table, row_of, hot_tokens, width):
    """The scores of the paths, and the least gap between one that is expanded and one that is not,
    or between children that are taken and not."""
    live, found, gap = {(): 0.0}, {(): 0.0}, float("inf")
    for step in range(steps):
        level = {}
        for path, score in live.items():
            row = logits[step].double()
            last = path[-1] if path else root
            if row_of[last] >= 0:
                row[hot_tokens.long()] += table[row_of[last]].double()
            log_probs = row.log_softmax(0)
            best = log_probs.sort(descending=True, stable=True)
            values, tokens = best.values.tolist(), best.indices.tolist()
            if len(values) > width:
                gap = min(gap, values[width - 1] - values[width])
            level |= {
                (*path, token): score + value
                for token, value in zip(tokens[:width], values[:width], strict=True)
            }
        found |= level
        order = sorted(level.items(), key=lambda item: -item[1])
        if len(order) > width:
            gap = min(gap, order[width - 1][1] - order[width][1])
        live = dict(order[:width])
    return found, gap


@CASES
@given(cases())
def test_the_trees_are_those_of_algorithm_1(cpu_path, case):
    logits, steps, roots, *info = case
    tokens, parents, scores = expand_token_trees(*case)
    assert tokens.dtype == parents.dtype == torch.int32
    for row, count in enumerate(steps.tolist()):
        expected, gap = by_hand(logits[row], count, int(roots[row]), *info)
        assume(gap > 1e-4)
        found = paths_of(*(each[row].tolist() for each in (tokens, parents, scores)))
        assert found.keys() == expected.keys()
        for path, score in expected.items():
            assert found[path] == pytest.approx(float(torch.tensor(score).exp()), rel=1e-3)
        live = (scores[row] > 0).nonzero()[1:, 0]
        above = parents[row, live].long()
        assert (above < live).all()
        assert (scores[row, live] <= scores[row, above]).all()
        gone = torch.ones(scores.shape[1], dtype=torch.bool).index_fill(0, live, False)
        assert (parents[row, gone] == -1).all()
        assert (tokens[row, gone][1:] == -1).all()


@CASES
@given(cases())
def test_cpp_has_the_columns_of_the_reference(case):
    found, expected = module._expand_cpp(*case), module._expand_reference(*case)
    (tokens, parents, scores), (own_tokens, own_parents, own_scores) = found, expected
    # What is nearly as likely may be expanded in another order.
    for row in own_scores[:, 1:]:
        ordered = row[row > 0].log().sort().values
        assume(len(ordered) < 2 or ordered.diff().min() > 1e-5)
    assert torch.equal(tokens, own_tokens)
    assert torch.equal(parents, own_parents)
    torch.testing.assert_close(scores, own_scores, atol=1e-6, rtol=1e-3)


def test_impossible_tokens_are_not_drafted(cpu_path):
    logits = torch.tensor([[[0.0, -torch.inf, 1.0, -torch.inf, -torch.inf]] * 2])
    row_of = torch.tensor([-1, -1, 1, 0, -1], dtype=torch.int32)
    hot = torch.tensor([3, 2], dtype=torch.int32)
    roots = torch.tensor([2], dtype=torch.int32)
    case = logits, torch.tensor([2]), roots, torch.ones(2, 2), row_of, hot, 3
    paths = paths_of(*(each[0].tolist() for each in expand_token_trees(*case)))
    assert set(paths) == {(), *((a,) for a in (0, 2)), *((a, b) for a in (0, 2) for b in (0, 2))}
    after_2, after_0 = (torch.tensor(row).softmax(0).tolist() for row in ([0.0, 2.0], [0.0, 1.0]))
    assert paths[2,] == pytest.approx(after_2[1])
    assert paths[0, 2] == pytest.approx(after_2[0] * after_0[1])


def test_equal_logits_are_ordered_by_lowest_id(cpu_path):
    hot, row_of = torch.tensor([4], dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    row_of[4] = 0
    case = torch.zeros(1, 1, 5), torch.tensor([1]), hot * 0, torch.zeros(1, 1), row_of, hot, 3
    tokens, parents, _ = expand_token_trees(*case)
    assert tokens.tolist() == [[0, 0, 1, 2]]
    assert parents.tolist() == [[-1, 0, 0, 0]]


def test_shapes_that_do_not_fit_are_errors():
    logits, steps, roots, table, row_of, hot, width = random_case(0, 2, 3, 2, 20, 5)
    for wrong in (
        (logits[0], steps, roots, table, row_of, hot, width),
        (logits, steps[:1], roots, table, row_of, hot, width),
        (logits, steps, roots[:1], table, row_of, hot, width),
        (logits, steps, roots, table[:4], row_of, hot, width),
        (logits, steps, roots, table, row_of[:4], hot, width),
        (logits, steps, roots, table, row_of, hot, 21),
    ):
        with pytest.raises(ValueError, match="expected"):
            expand_token_trees(*wrong)
