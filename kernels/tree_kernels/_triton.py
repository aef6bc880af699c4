"""Triton where it is installed: the modules, a decorator for kernels and the choice of the path.

Without Triton the kernels stay plain functions that nobody calls, so every module imports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

__all__ = ["jit", "next_power_of_2", "path_pad", "tl", "use_triton"]


@overload
def jit(fn: Callable[..., Any]) -> Any: ...
@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Any]: ...
def jit(fn: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit` where Triton is installed, else the function itself.

    do_not_specialize: arguments that change while serving. Without this a kernel is compiled anew
        where an integer becomes 1 or a multiple of 16, or a tensor begins at such an address.
    """
    if fn is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    return fn if triton is None else triton.jit(fn, do_not_specialize=[*do_not_specialize])


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` runs its Triton kernel."""
    return triton is not None and tensor.is_cuda


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def path_pad(length: int) -> int:
    """Lanes for paths of `length` nodes: as many for all usual ones, lest each be compiled for."""
    return max(16, next_power_of_2(length))
