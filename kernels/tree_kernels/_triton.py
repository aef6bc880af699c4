"""Triton where it is installed: its modules, and the decorator for kernels.

Without Triton a kernel stays a plain function that is never called, so every module imports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, overload

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

__all__ = ["jit", "next_power_of_2", "path_pad", "tl", "triton"]


@overload
def jit(fn: Callable[..., Any]) -> Any: ...
@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Any]: ...
def jit(fn: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit` where Triton is installed, else the function itself.

    Args:
        fn: The kernel.
        do_not_specialize: Names of the arguments that change while serving. Triton compiles a
            kernel again when another argument, an integer, becomes 1 or a multiple of 16, or, a
            tensor, begins at an address that is a multiple of 16.

    Raises:
        ValueError: `do_not_specialize` names an argument that the kernel does not have.
    """
    if fn is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    if unknown := {*do_not_specialize} - {*inspect.signature(fn).parameters}:
        raise ValueError(f"{fn.__name__} has no argument {min(unknown)!r}")
    return fn if triton is None else triton.jit(fn, do_not_specialize=[*do_not_specialize])


@cache
def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def path_pad(length: int) -> int:
    """Lanes for paths of `length` nodes: 16, or 128 for trees with a spine, so that paths of all
    usual lengths share two compilations."""
    return 16 if length <= 16 else max(128, next_power_of_2(length))
