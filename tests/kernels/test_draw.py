"""Sampled tokens, compared with the softmax and with the PyTorch reference."""

import pytest
import torch
from tree_kernels import draw
from tree_kernels.draw import draw_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def logits_of(rows, vocab, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)


def p_value(counts, expected):
    """The p-value of Pearson's chi-square test."""
    freedom = torch.tensor((len(counts) - 1) / 2)
    return float(torch.special.gammaincc(freedom, ((counts - expected) ** 2 / expected).sum() / 2))


def drawn(logits, temperatures, seed):
    return draw_tokens(logits, temperatures, torch.tensor([seed]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_softmax(temperature):
    rows, vocab = 20_000, 12
    logits = logits_of(1, vocab, 3) / 5
    tokens = drawn(logits.expand(rows, -1), torch.full((rows,), temperature), 11)
    expected = (logits[0] / temperature).softmax(0) * rows
    assert expected.min() > 5
    assert p_value(torch.bincount(tokens, minlength=vocab), expected) > 0.001


def test_rows_and_seeds_have_independent_draws():
    rows, vocab = 20_000, 4
    tokens = drawn(torch.zeros(rows, vocab), torch.ones(rows), 5)
    others = drawn(torch.zeros(rows, vocab), torch.ones(rows), 2**61 + 5)
    for pairs in (4 * tokens[1:] + tokens[:-1], 4 * tokens + others):
        counts = torch.bincount(pairs, minlength=16)
        assert p_value(counts, torch.full((16,), len(pairs) / 16)) > 0.001
    assert torch.equal(tokens, drawn(torch.zeros(rows, vocab), torch.ones(rows), 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_0_takes_the_most_likely_token(dtype):
    logits = logits_of(6, 9001, 1, dtype)
    logits[0, [4097, 4096, 17]] = 100.0
    logits[1] = -torch.inf
    logits[1, 8999] = -60000.0
    logits[2] = -torch.inf
    temperatures = torch.zeros(6)
    tokens = drawn(logits, temperatures, 9)
    assert tokens[:3].tolist() == [17, 8999, 0]
    assert torch.equal(tokens[3:], logits[3:].float().argmax(1).int())


def test_a_masked_token_is_never_drawn():
    logits = torch.full((2000, 300), -torch.inf)
    logits[:, [7, 250]] = 0.0
    tokens = drawn(logits, torch.ones(2000), 2)
    assert set(tokens.tolist()) == {7, 250}


def shuffled_cases():
    for vocab in (1, 7, 4095, 4097, 20_000):
        for rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (2, torch.float16)):
            yield logits_of(rows, vocab, vocab + rows, dtype)


def test_the_kernel_draws_what_the_reference_draws(interpreter, monkeypatch):
    monkeypatch.setattr(draw._DRAW, "on_cpu", draw._draw_triton)
    for number, logits in enumerate(shuffled_cases()):
        temperatures = torch.tensor([0.7, 0.0, 2.0])[: len(logits)]
        seed = torch.tensor([number * 10**17])
        expected = draw._draw_reference(logits, temperatures, seed)
        assert torch.equal(draw_tokens(logits, temperatures, seed), expected)
    wide = logits_of(4, 18_000, 1)[:, ::2]
    expected = draw._draw_reference(wide, torch.ones(4), torch.tensor([3]))
    assert torch.equal(drawn(wide, torch.ones(4), 3), expected)
    assert drawn(torch.empty(0, 5), torch.empty(0), 1).tolist() == []


@pytest.mark.cuda
def test_the_gpu_draws_what_the_reference_draws():
    for number, logits in enumerate(shuffled_cases()):
        temperatures = torch.tensor([0.7, 0.0, 2.0])[: len(logits)]
        seed = torch.tensor([number * 10**17])
        expected = draw._draw_reference(logits, temperatures, seed)
        given = (each.cuda() for each in (logits, temperatures, seed))
        assert torch.equal(draw_tokens(*given).cpu(), expected)


def test_shapes_that_do_not_fit_are_errors():
    logits, temperatures, seed = torch.zeros(2, 5), torch.ones(2), torch.tensor([1])
    for wrong in (
        (logits, torch.ones(3), seed),
        (logits, temperatures, torch.tensor(1)),
        (logits[0], temperatures, seed),
    ):
        with pytest.raises(ValueError, match="must be"):
            draw_tokens(*wrong)
