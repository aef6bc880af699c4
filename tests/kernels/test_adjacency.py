"""Top candidates and the matrix update, compared with sorting and writing row by row in Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import _vocab_shares, adjacency
from tree_kernels.adjacency import recycle, top_candidates

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
VOCABS = st.integers(1, 90) | st.sampled_from([1024, 1031, 2048, 5003])


def make_logits(seed, rows, vocab, dtype, kind):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[torch.rand(rows, vocab, generator=generator) < 0.9] = -math.inf
    if kind == "all_masked":
        logits.fill_(-math.inf)
    if kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    # Rows are longer than the vocabulary, as engines pad them.
    return torch.cat((logits, torch.full((rows, 5), 99.0)), 1).to(dtype)[:, :vocab]


@st.composite
def logits_and_k(draw, vocabs=VOCABS):
    vocab = draw(vocabs)
    k = draw(st.integers(1, min(vocab, 11)))
    kind = draw(st.sampled_from(["plain", "ties", "masked", "all_masked", "zeros"]))
    rows = draw(st.integers(0, 5))
    return make_logits(draw(st.integers(0, 99)), rows, vocab, draw(DTYPES), kind), k


def sorted_ids(logits, k):
    return [
        sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k]
        for row in logits.float().tolist()
    ]


def updated(matrix, tokens, candidates):
    rows = matrix.tolist()
    for token, line in zip(tokens.tolist(), candidates.tolist(), strict=True):
        if 0 <= token < len(rows):
            rows[token] = line
    return rows


def logits_with(candidates):
    """Logits whose top candidates are the given ones."""
    scores = torch.arange(candidates.shape[1], 0.0, -1).expand(candidates.shape)
    return torch.zeros(len(candidates), candidates.numel()).scatter(1, candidates.long(), scores)


@st.composite
def updates(draw):
    rows, k = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    few = st.integers(-2, 6)
    tokens = torch.tensor(draw(st.lists(few, min_size=rows, max_size=rows)))
    tokens = tokens.to(draw(st.sampled_from([torch.int32, torch.int64])))
    candidates = torch.arange(rows * k, dtype=torch.int32).view(rows, k)
    return torch.full((5, k), -1, dtype=torch.int32), tokens, candidates


@CASES
@given(logits_and_k())
def test_candidates_are_the_largest_logits_lowest_id_first(cpu_path, case):
    logits, k = case
    found = top_candidates(logits, k)
    assert found.dtype == torch.int32
    assert found.tolist() == sorted_ids(logits, k)
    assert found[:, 0].tolist() == logits.argmax(1).tolist()


@CASES
@given(logits_and_k(st.sampled_from([1, 3, 31, 64, 100, 4099, 5003])))
def test_kernel_finds_the_same_candidates(interpreter, case):
    logits, k = case
    found = adjacency._top_triton(logits, k)
    assert found.tolist() == top_candidates(logits, k).tolist()


@CASES
@given(logits_and_k(st.sampled_from([31, 100, 517])), st.sampled_from([1, 7, 512]))
def test_kernel_merges_shares_of_the_vocabulary(interpreter, case, programs):
    logits, k = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adjacency, "_TILE", 32)
        patch.setattr(_vocab_shares, "_PROGRAMS", programs)
        found = adjacency._top_triton(logits, k)
    assert found.tolist() == top_candidates(logits, k).tolist()


def test_best_ids_may_all_lie_in_one_block_or_in_the_tail(cpu_path):
    for start in (0, 1000, 2048, 2993):
        logits = torch.zeros(1, 3001)
        logits[0, start : start + 8] = torch.arange(1.0, 9.0)
        assert top_candidates(logits, 8).tolist() == [list(range(start + 7, start - 1, -1))]


def test_nan_counts_as_the_largest(cpu_path, interpreter):
    logits = torch.tensor([[0.0, math.inf, math.nan, -math.inf, -math.nan, 1.0]])
    assert top_candidates(logits, 4).tolist() == [[2, 4, 1, 5]]
    assert adjacency._top_triton(logits, 4).tolist() == [[2, 4, 1, 5]]


@CASES
@given(updates())
def test_the_last_row_of_a_token_writes_its_whole_row(cpu_path, case):
    matrix, tokens, candidates = case
    expected = updated(matrix, tokens, candidates)
    recycle(matrix, tokens, logits_with(candidates))
    assert matrix.tolist() == expected


@CASES
@given(updates())
def test_kernel_writes_the_same_rows(interpreter, case):
    matrix, tokens, candidates = case
    expected = updated(matrix, tokens, candidates)
    adjacency._recycle_triton(matrix, tokens, logits_with(candidates))
    assert matrix.tolist() == expected


def test_a_later_duplicate_is_seen_across_the_kernel_s_blocks_of_rows(interpreter):
    tokens = torch.arange(300, dtype=torch.int32) % 290
    logits = torch.eye(300)
    matrix = torch.full((290, 1), -1, dtype=torch.int32)
    adjacency._recycle_triton(matrix, tokens, logits)
    assert matrix[:, 0].tolist() == [*range(290, 300), *range(10, 290)]


@CASES
@given(st.integers(0, 99), DTYPES)
def test_recycle_writes_what_it_returns(cpu_path, interpreter, seed, dtype):
    logits = make_logits(seed, 9, 77, dtype, "ties")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 5, (9,), dtype=torch.int32, generator=generator)
    empty = torch.full((4, 3), -1, dtype=torch.int32)
    by_kernel, by_reference = empty.clone(), empty.clone()
    found = adjacency._recycle_triton(by_kernel, tokens, logits)
    assert found.tolist() == recycle(by_reference, tokens, logits).tolist() == sorted_ids(logits, 3)
    assert by_kernel.tolist() == by_reference.tolist() == updated(empty, tokens, found)
    assert (by_reference >= 0).any()


def test_shapes_that_do_not_fit_are_errors():
    matrix = torch.zeros(4, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="k = 5"):
        top_candidates(torch.zeros(2, 4), 5)
    with pytest.raises(ValueError, match="k = 3"):
        recycle(matrix, torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="matrix"):
        recycle(matrix.T, torch.zeros(2, dtype=torch.int32), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="tokens"):
        recycle(matrix, torch.zeros(1, dtype=torch.int32), torch.zeros(2, 5))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 32000), (81, 49152), (648, 128256)])
def test_cuda_agrees_with_the_cpu(rows, vocab, dtype):
    logits = make_logits(rows, rows, vocab, dtype, "plain")
    tokens = torch.randint(-1, 40, (rows,), dtype=torch.int32)
    matrix = torch.full((vocab, 8), -1, dtype=torch.int32)
    on_device = matrix.cuda()
    found = recycle(on_device, tokens.cuda(), logits.cuda())
    assert found.tolist() == recycle(matrix, tokens, logits).tolist()
    assert torch.equal(on_device.cpu(), matrix)
