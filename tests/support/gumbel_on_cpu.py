"""vLLM's kernels that divide logits by temperatures and sample tokens, in NumPy.

In Triton's interpreter each takes one program of many operations for each row, which is most of the
time of a step with draft trees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

DRAFT_SALT = 1 << 30
"""Added to the positions of draft tokens."""


def apply_temperature(logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide logits, `[R, V]`, by the temperatures of their requests, in place.

    Args:
        logits: `[R, V]`.
        rows: The request of each row, `[R]`.
        temperature: Of each request; 0 stands for greedy ones, which are left alone.
    """
    heat = temperature.numpy()[rows.numpy()].astype(np.float32)
    heat[heat == 0] = 1
    logits.numpy()[:] /= heat[:, None]


def gumbel_sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: None = None,
    logits_cache_col: None = None,
    use_fp64: bool = False,
    **further: None,
) -> torch.Tensor:
    """Sample a token for each row; greedily at temperature 0. Parameters are the kernel's.

    Args:
        logits: `[R, V]`.
        rows: The request of each row, `[R]`.
        temperature: Of each request.
        seed: Of each request.
        pos: The position of each row, `[R]`.
        apply_temperature: Whether the logits are to be divided by the temperature.
        is_drafting: Whether the tokens are drafts.
        logits_cache: Not supported, as nothing after it.
        logits_cache_col: None.
        use_fp64: False.
        further: None.

    Returns:
        `int64 [R]`.
    """
    assert logits_cache is None
    assert not use_fp64
    requests = rows.numpy()
    heat = temperature.numpy()[requests].astype(np.float32)
    values = logits.float().numpy()
    tokens = values.argmax(1)
    (sampled,) = heat.nonzero()
    if len(sampled):
        noisy = values[sampled]
        if apply_temperature:
            noisy = noisy / heat[sampled, None]
        places = pos.numpy()[sampled].astype(np.int64) + is_drafting * DRAFT_SALT
        seeds = seed.numpy()[requests[sampled]].astype(np.int64)
        tokens[sampled] = (noisy + _noise(seeds, places, values.shape[1])).argmax(1)
    return torch.from_numpy(tokens)


def _noise(seeds: Array, positions: Array, vocab_size: int) -> Array:
    """Gumbel noise by seed, position and token, `float32 [R, V]`."""
    hashed = np.zeros(len(seeds), np.uint32)
    for word in (_low(seeds), _low(seeds >> 32), _low(positions)):
        hashed = _mix(hashed, word)
    hashed = _mix(hashed[:, None], np.arange(vocab_size, dtype=np.uint32)[None])
    hashed = _finish(hashed ^ np.uint32(16))
    high = (hashed >> np.uint32(16)).astype(np.float32)
    low = (hashed & np.uint32(0xFFFF)).astype(np.float32)
    uniform = high * np.float32(2.0**-16) + (low + np.float32(0.5)) * np.float32(2.0**-32)
    return -np.log(-_log_of_rest(uniform))


def _low(numbers: Array) -> Array:
    return (numbers & 0xFFFFFFFF).astype(np.uint32)


def _rotated(numbers: Array, by: int) -> Array:
    return (numbers << np.uint32(by)) | (numbers >> np.uint32(32 - by))


def _mix(hashed: Array, key: Array) -> Array:
    """A step of MurmurHash3."""
    key = _rotated(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(hashed ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _finish(hashed: Array) -> Array:
    hashed = (hashed ^ (hashed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hashed = (hashed ^ (hashed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return hashed ^ (hashed >> np.uint32(16))


def _log_of_rest(value: Array) -> Array:
    """log(1 - value), by a polynomial where the value is small, as the kernel does."""
    polynomial = np.full_like(value, 1 / 8)
    for divisor in range(7, 0, -1):
        polynomial = np.float32(1 / divisor) + value * polynomial
    direct = np.log(np.maximum(np.float32(1) - value, np.float32(5.960464477539063e-08)))
    return np.where(value < np.float32(0.25), -value * polynomial, direct)


def sample_in_both_ways(cases: list[tuple[tuple[int, ...], bool, bool]]) -> list[Array]:
    """Tokens that the kernels and this module sample, `int64 [2, R]` for each case.

    Args:
        cases: The shape of the logits, whether the sampler is to divide them by the temperature,
            which otherwise is done before, and whether tokens are drafts.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    generator = torch.Generator().manual_seed(1)
    answers = []
    for shape, by_sampler, is_drafting in cases:
        logits = 3 * torch.randn(shape, generator=generator)
        rows = torch.randint(4, shape[:1], generator=generator, dtype=torch.int32)
        temperature = torch.tensor([0.0, 0.7, 1.0, 1.6])
        seeds = torch.tensor([3, 17, -5, 1 << 40])
        positions = torch.randint(1 << 20, shape[:1], generator=generator)
        both = []
        for divide, sample in (
            (gumbel.apply_temperature, gumbel.gumbel_sample),
            (apply_temperature, gumbel_sample),
        ):
            divided = logits.clone()
            if not by_sampler:
                divide(divided, rows, temperature)
            both.append(
                sample(divided, rows, temperature, seeds, positions, by_sampler, is_drafting)
            )
        answers.append(torch.stack(both).numpy())
    return answers
