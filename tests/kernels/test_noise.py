"""Random numbers keyed by seed and length, compared with the PyTorch reference."""

from __future__ import annotations

import pytest
import torch
from tree_kernels import noise
from tree_kernels.noise import uniform_numbers

SEEDS = torch.tensor([0, 7, -1, 2**62 + 5, -(2**63)])
LENGTHS = torch.tensor([1, 1, 4096, 2**31 + 3, 0])


def p_value(counts: torch.Tensor) -> float:
    """The p-value of Pearson's chi-square test of equal frequencies."""
    expected = counts.sum() / len(counts)
    freedom = torch.tensor((len(counts) - 1) / 2)
    return float(torch.special.gammaincc(freedom, ((counts - expected) ** 2 / expected).sum() / 2))


def test_known_numbers() -> None:
    """The first words of Philox 4x32-10 for a key and a counter of zeros."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    zero = torch.zeros(1, dtype=torch.int64)
    drawn = uniform_numbers(zero, zero, 0, 4)[0]
    assert drawn.tolist() == pytest.approx([word / 2**32 for word in words], abs=1e-7)


@pytest.mark.parametrize("count", [1, 4, 63, 64, 5001])
def test_cpp_draws_what_the_reference_draws(count: int) -> None:
    for stream in (0, 5):
        expected = noise._uniform_reference(SEEDS, LENGTHS, stream, count)
        assert torch.equal(uniform_numbers(SEEDS, LENGTHS, stream, count), expected)
        assert torch.equal(
            expected, noise._uniform_reference(SEEDS, LENGTHS, stream, 6000)[:, :count]
        )


def test_the_kernel_draws_what_the_reference_draws(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise._UNIFORM_NUMBERS, "on_cpu", noise._uniform_triton)
    for count in (0, 3, 1025):
        expected = noise._uniform_reference(SEEDS, LENGTHS, 3, count)
        assert torch.equal(uniform_numbers(SEEDS, LENGTHS, 3, count), expected)
    none = torch.empty(0, dtype=torch.int64)
    assert uniform_numbers(none, none, 0, 5).shape == (0, 5)


@pytest.mark.cuda
def test_the_gpu_draws_what_the_reference_draws() -> None:
    expected = noise._uniform_reference(SEEDS, LENGTHS, 3, 5001)
    assert torch.equal(uniform_numbers(SEEDS.cuda(), LENGTHS.cuda(), 3, 5001).cpu(), expected)


def test_numbers_are_uniform_and_independent() -> None:
    """Neighbours in place, length, seed and stream are."""
    seeds, lengths = torch.arange(40).repeat_interleave(40), torch.arange(40).repeat(40)
    drawn = torch.stack([uniform_numbers(seeds, lengths, stream, 50) for stream in (0, 1)], 1)
    cells = (drawn.double() * 8).long().clamp(max=7).view(40, 40, 2, 50)
    assert p_value(torch.bincount(cells.flatten(), minlength=8).double()) > 0.001
    for dim in range(4):
        size = cells.shape[dim]
        pairs = 8 * cells.narrow(dim, 0, size - 1) + cells.narrow(dim, 1, size - 1)
        assert p_value(torch.bincount(pairs.flatten(), minlength=64).double()) > 0.001
    assert 0 < float(drawn.min()) < 1e-4
    assert 1 - 1e-4 < float(drawn.max()) < 1


def test_shapes_and_types_that_do_not_fit_are_errors() -> None:
    for wrong in ((SEEDS, LENGTHS[:2]), (SEEDS.int(), LENGTHS), (SEEDS[0], LENGTHS[0])):
        with pytest.raises(ValueError, match="must be"):
            uniform_numbers(*wrong, 0, 4)
