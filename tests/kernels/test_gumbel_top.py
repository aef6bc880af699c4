"""Tokens drawn without replacement, compared with the PyTorch reference."""

from __future__ import annotations

import pytest
import torch
from tree_kernels import gumbel_top as module
from tree_kernels.gumbel_top import Perturbed, gumbel_top

SEEDS = torch.tensor([7, -1, 2**62 + 5])
LENGTHS = torch.tensor([1, 4096, 2**31 + 3])
DRAWS = torch.tensor([True, False, True])


@pytest.fixture
def kernel(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._GUMBEL_TOP, "on_cpu", module._triton)


def distributions(width: int, vocab: int) -> torch.Tensor:
    logits = 3 * torch.randn(3, width, vocab, generator=torch.Generator().manual_seed(vocab))
    return logits.softmax(2)


def assert_same(found: Perturbed, expected: Perturbed) -> None:
    possible = torch.isfinite(expected.values)
    assert torch.equal(torch.isfinite(found.values), possible)
    assert torch.equal(found.tokens[possible], expected.tokens[possible])
    for each, other in ((found.values, expected.values), (found.log_probs, expected.log_probs)):
        torch.testing.assert_close(each[possible], other[possible], atol=2e-5, rtol=2e-5)
    assert (found.values[..., :-1] >= found.values[..., 1:]).all()


@pytest.mark.parametrize(
    ("width", "vocab", "count"), [(1, 5, 5), (3, 131, 4), (2, 4099, 3), (5, 2050, 1)]
)
def test_the_kernel_draws_what_the_reference_draws(
    kernel: None, width: int, vocab: int, count: int
) -> None:
    """Rows begin at any of a counter's four numbers, and large vocabularies are read in shares."""
    probs = distributions(width, vocab)
    given = SEEDS, LENGTHS, DRAWS, 3, count
    assert_same(gumbel_top(probs, *given), module._reference(probs, *given))


def test_tokens_that_filters_leave_out_are_not_drawn(kernel: None) -> None:
    probs = distributions(2, 300)
    probs[:, :, 2:] = 0.0
    given = SEEDS, LENGTHS, DRAWS, 1, 4
    found = gumbel_top(probs, *given)
    assert torch.isfinite(found.values).sum(2).eq(2).all()
    assert_same(found, module._reference(probs, *given))


def test_without_noise_the_most_likely_tokens_are_taken(kernel: None) -> None:
    probs = distributions(2, 700)
    found = gumbel_top(probs, SEEDS, LENGTHS, torch.zeros(3, dtype=torch.bool), 1, 3)
    assert torch.equal(found.tokens, probs.topk(3, dim=2).indices)
    assert torch.equal(found.values, found.log_probs)


def test_many_tokens_are_sorted(kernel: None) -> None:
    probs = distributions(1, 100)
    given = SEEDS, LENGTHS, DRAWS, 2, 80
    assert_same(gumbel_top(probs, *given), module._reference(probs, *given))


def test_no_requests(kernel: None) -> None:
    none = torch.empty(0, dtype=torch.int64)
    found = gumbel_top(torch.empty(0, 2, 9), none, none, none.bool(), 0, 3)
    assert [each.shape for each in found] == [(0, 2, 3)] * 3


@pytest.mark.cuda
def test_the_gpu_draws_what_the_reference_draws() -> None:
    probs = distributions(3, 151936)
    given = SEEDS, LENGTHS, DRAWS
    found = gumbel_top(probs.cuda(), *(each.cuda() for each in given), 3, 4)
    expected = module._reference(probs, *given, 3, 4)
    assert_same(Perturbed(*(each.cpu() for each in found)), expected)


def test_what_does_not_fit_is_an_error() -> None:
    probs = distributions(1, 5)
    for wrong in (
        (probs[0], SEEDS, LENGTHS, DRAWS, 0, 1),
        (probs.double(), SEEDS, LENGTHS, DRAWS, 0, 1),
        (probs, SEEDS[:2], LENGTHS, DRAWS, 0, 1),
        (probs, SEEDS.int(), LENGTHS, DRAWS, 0, 1),
        (probs, SEEDS, LENGTHS, DRAWS.int(), 0, 1),
        (probs, SEEDS, LENGTHS, DRAWS, 0, 6),
        (probs, SEEDS, LENGTHS, DRAWS, 0, 0),
    ):
        with pytest.raises(ValueError, match="must be float32"):
            gumbel_top(*wrong)
