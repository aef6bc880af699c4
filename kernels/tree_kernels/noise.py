"""Uniform random numbers of a step, keyed by each request's seed and length.

They come from Philox 4x32-10 (Salmon et al., SC 2011), whose key is the seed. The counter consists
of the number's place, of the stream, which tells a step's draws apart, and of the request's length,
which changes with every step. So a request's numbers do not depend on its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._philox import GREATEST, HALF, SCALE, numbers, philox, uniform
from tree_kernels._triton import jit, tl

_UNIFORM = CppFunction("noise.cpp", "uniform_numbers", "ppiiipi")
# A quarter of the numbers that a program writes.
_LANES = 256


@jit(do_not_specialize=["stream", "count"])
def _uniform_kernel(
    seeds: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    stream: tl.tensor,
    count: tl.tensor,
    LANES: tl.constexpr,
    SCALE: tl.constexpr,
    HALF: tl.constexpr,
    GREATEST: tl.constexpr,
) -> None:
    """Write the four numbers of some counters; one program per request and share of them."""
    request = tl.program_id(0).to(tl.int64)
    counter = tl.program_id(1) * LANES + tl.arange(0, LANES)
    length = tl.load(lengths + request).to(tl.uint32)
    one, two, three, four = philox(tl.load(seeds + request), counter, stream.to(tl.uint32), length)
    place = 4 * counter
    line = out + request * count + place
    tl.store(line, uniform(one, SCALE, HALF, GREATEST), mask=place < count)
    tl.store(line + 1, uniform(two, SCALE, HALF, GREATEST), mask=place + 1 < count)
    tl.store(line + 2, uniform(three, SCALE, HALF, GREATEST), mask=place + 2 < count)
    tl.store(line + 3, uniform(four, SCALE, HALF, GREATEST), mask=place + 3 < count)


def _uniform_triton(seeds: Tensor, lengths: Tensor, stream: int, count: int) -> Tensor:
    out = torch.empty(len(seeds), count, device=seeds.device)
    if out.numel():
        programs = -(-count // (4 * _LANES))
        _uniform_kernel[(len(seeds), programs)](
            *(seeds, lengths, out, stream, count),
            LANES=_LANES,
            SCALE=SCALE,
            HALF=HALF,
            GREATEST=GREATEST,
        )
    return out


def _uniform_reference(seeds: Tensor, lengths: Tensor, stream: int, count: int) -> Tensor:
    counters = torch.arange(-(-count // 4), device=seeds.device)
    drawn = numbers(seeds[:, None], counters, stream, lengths.long()[:, None])
    return drawn.transpose(1, 2).flatten(1)[:, :count].contiguous()


def _uniform_cpp(seeds: Tensor, lengths: Tensor, stream: int, count: int) -> Tensor:
    lengths = lengths.long()
    out = torch.empty(len(seeds), count, device=seeds.device)
    _UNIFORM.call(
        *(seeds.data_ptr(), lengths.data_ptr(), len(seeds), stream, count, out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


_UNIFORM_NUMBERS = Op(
    "noise.uniform_numbers",
    _uniform_reference,
    triton=_uniform_triton,
    cpp=_uniform_cpp,
    needs=_UNIFORM,
)


def uniform_numbers(seeds: Tensor, lengths: Tensor, stream: int, count: int) -> Tensor:
    """Uniform numbers in (0, 1) for each request.

    Args:
        seeds: Int64 `[B]`.
        lengths: Integers `[B]`, not negative.
        stream: Which of the step's draws this is, not negative.
        count: Number of numbers for each request.

    Returns:
        Float32 `[B, count]`. The first numbers do not depend on `count`.

    Raises:
        ValueError: Shapes or types do not fit.
    """
    if seeds.dtype != torch.int64 or seeds.dim() != 1 or seeds.shape != lengths.shape:
        raise ValueError(
            f"seeds {seeds.dtype} {[*seeds.shape]} and lengths {[*lengths.shape]} must be int64 "
            "[B] and [B]"
        )
    return _UNIFORM_NUMBERS.on(seeds)(seeds.contiguous(), lengths.contiguous(), stream, count)
