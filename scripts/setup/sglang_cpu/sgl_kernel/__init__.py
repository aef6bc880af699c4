"""Replaces SGLang's CPU kernels, which are on no package index for plain x86.

The kernels that a dense decoder calls on a CPU without AMX are written in PyTorch. All other names
can be imported and fail when they are called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0"


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """Write `slots`, one request after another, into columns `starts` to `ends` of their rows."""
    given = slots.to(table.dtype).split((ends - starts).tolist())
    for row, start, end, new in zip(
        requests.tolist(), starts.tolist(), ends.tolist(), given, strict=True
    ):
        table[row, start:end] = new


def copy_all_layer_kv_cache_cpu(
    addresses: torch.Tensor, row_bytes: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy rows `sources` to rows `targets` in every cache, all reads before all writes."""
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * size, size) for row in sources.tolist()]
        for row, content in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + row * size, content, size)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not written for CPUs here")

    return missing
