"""Token-info sampling, compared with the softmax over the summed logits of each node."""

import pytest
import torch
from hot_tokens import random_hot_tokens
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import token_info as module
from tree_kernels.token_info import token_info_top


def random_case(seed, requests, width, vocab, hot, k, dtype=torch.float32, float8=False):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(requests, vocab, generator=generator)
    row_of, hot_tokens = random_hot_tokens(vocab, hot, generator)
    tokens = torch.randint(-1, vocab, (requests, width), generator=generator, dtype=torch.int32)
    table = torch.randn(hot, hot, generator=generator).to(dtype)
    if float8:
        table = table.to(torch.float8_e4m3fn)
    return logits.to(dtype), tokens, table, row_of, hot_tokens, k


@st.composite
def cases(draw):
    vocab = draw(st.integers(2, 40) | st.just(2500))
    return random_case(
        draw(st.integers(0, 99)),
        requests=draw(st.integers(1, 3)),
        width=draw(st.integers(1, 4)),
        vocab=vocab,
        hot=draw(st.integers(1, vocab)),
        k=draw(st.integers(1, min(vocab, 9))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        float8=draw(st.booleans()),
    )


def by_hand(logits, tokens, table, row_of, hot_tokens, token, request):
    row = logits[request].double()
    table = table.float()
    if row_of[token] >= 0:
        for column, hot in enumerate(hot_tokens.tolist()):
            row[hot] += float(table[row_of[token], column])
    return row.log_softmax(0)


@CASES
@given(cases())
def test_the_tokens_are_the_most_likely_of_the_softmax(case):
    *given_, k = case
    tokens = given_[1]
    found, log_probs = token_info_top(*case)
    assert found.dtype == torch.int32
    for request, line in enumerate(tokens.tolist()):
        for node, token in enumerate(line):
            if token < 0:
                assert (found[request, node] == -1).all()
                assert (log_probs[request, node] == -torch.inf).all()
                continue
            expected = by_hand(*given_, token, request)
            torch.testing.assert_close(
                log_probs[request, node].double(), expected.topk(k).values, atol=1e-4, rtol=0
            )
            own = expected[found[request, node].long()]
            torch.testing.assert_close(own, expected.topk(k).values, atol=1e-4, rtol=0)


@CASES
@given(cases())
def test_the_kernel_gives_the_same(interpreter, case):
    tokens, log_probs = token_info_top(*case)
    kernel_tokens, kernel_log_probs = module._token_info_triton(*case)
    assert torch.equal(kernel_tokens, tokens)
    torch.testing.assert_close(kernel_log_probs, log_probs, atol=1e-5, rtol=1e-5)


def test_the_kernel_reads_the_logits_of_one_step_where_they_are(interpreter):
    logits, *others = random_case(5, 3, 2, 37, 9, 3)
    steps = torch.randn(3, 2, 37)
    steps[:, 1] = logits
    by_column = logits.T.contiguous().T
    expected = token_info_top(logits, *others)
    for given_ in (steps[:, 1], by_column):
        found = module._token_info_triton(given_, *others)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


def test_impossible_tokens_have_no_probability():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf, -torch.inf]])
    row_of = torch.tensor([-1, -1, 1, 0, -1], dtype=torch.int32)
    hot = torch.tensor([3, 2], dtype=torch.int32)
    case = (logits, torch.tensor([[2]], dtype=torch.int32), torch.ones(2, 2), row_of, hot, 2)
    found, log_probs = token_info_top(*case)
    assert found.tolist() == [[[2, 0]]]
    torch.testing.assert_close(log_probs[0, 0], torch.tensor([2.0, 0.0]).log_softmax(0))


def test_equal_logits_are_ordered_by_lowest_id():
    hot = torch.tensor([4], dtype=torch.int32)
    row_of = torch.tensor([-1, -1, -1, -1, 0], dtype=torch.int32)
    table = torch.zeros(1, 1)
    tokens = torch.tensor([[0]], dtype=torch.int32)
    found, _ = token_info_top(torch.zeros(1, 5), tokens, table, row_of, hot, 3)
    assert found.tolist() == [[[0, 1, 2]]]


def test_shapes_that_do_not_fit_are_errors():
    logits, tokens, table, row_of, hot, k = random_case(0, 2, 3, 20, 5, 2)
    for wrong in (
        (logits[0], tokens, table, row_of, hot, k),
        (logits, tokens[:1], table, row_of, hot, k),
        (logits, tokens, table[:4], row_of, hot, k),
        (logits, tokens, table, row_of[:4], hot, k),
        (logits, tokens, table, row_of, hot, 21),
    ):
        with pytest.raises(ValueError, match="expected"):
            token_info_top(*wrong)


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "vocab"), [(1, 49152), (8, 151936)])
def test_cuda_agrees_with_the_cpu(requests, vocab):
    *tensors, k = random_case(0, requests, 4, vocab, 8192, 4)
    found = token_info_top(*(tensor.cuda() for tensor in tensors), k)
    expected = token_info_top(*tensors, k)
    torch.testing.assert_close(found[1].cpu(), expected[1], atol=1e-4, rtol=1e-5)
