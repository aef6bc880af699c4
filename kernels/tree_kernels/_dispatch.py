"""Chooses the implementation of an operation: Triton, then C++, then the PyTorch reference.

Each operation is an `Op` with up to three implementations of one signature:

1. Triton, for tensors on a GPU, where Triton is installed;
2. C++, for tensors on the CPU, where the library is shipped or can be compiled (`_native.py`);
3. the PyTorch reference, which defines the result, for everything else.

The environment variable `DRAFTTREE_KERNELS=reference` forces the reference of every operation on
every device, to tell an error in a kernel from an error in its caller. It is much slower. The
variable is read once per process, when the first operation runs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from tree_kernels._native import load_native
from tree_kernels._triton import triton

logger = logging.getLogger(__name__)

VARIABLE = "DRAFTTREE_KERNELS"
"""The environment variable that forces the reference."""

TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
"""The C types of the letters of a `CppFunction`'s signature."""

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def is_reference_forced() -> bool:
    """Whether `DRAFTTREE_KERNELS` asks for the PyTorch reference of every operation.

    Raises:
        ValueError: The variable has another value than "reference" or "".
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "reference"):
        raise ValueError(
            f"{VARIABLE}={chosen!r} is not known: set it to 'reference' to run every operation in "
            "PyTorch, or unset it to run the kernels"
        )
    if chosen:
        logger.warning("%s=reference: every operation runs in PyTorch, more slowly", VARIABLE)
    return chosen == "reference"


@dataclass(frozen=True)
class CppFunction:
    """A function of a C++ file of this package, loaded when it is first needed.

    Attributes:
        source: Name of the C++ file.
        name: Name of the `extern "C"` function in it.
        signature: One letter for each argument: "p" for a pointer, "i" for an `int64_t`, "f"
            for a `float`.
    """

    source: str
    name: str
    signature: str

    @property
    def is_available(self) -> bool:
        """Whether the file's library is shipped or could be compiled, with this function in it."""
        return hasattr(self._library, self.name)

    @cached_property
    def call(self) -> Callable[..., None]:
        """The loaded function; may only be read if `is_available`."""
        function: Any = getattr(self._library, self.name)
        function.restype = None
        function.argtypes = [TYPES[letter] for letter in self.signature]
        return function  # type: ignore[no-any-return]

    @property
    def _library(self) -> ctypes.CDLL | None:
        return load_native(Path(__file__).with_name(self.source))


class Op(Generic[P, R]):
    """One operation with up to three implementations that take and return the same.

    Args:
        name: `module.function`, as in the table of `tree_kernels`.
        reference: The implementation in PyTorch, which runs on every device.
        triton: The implementation for GPUs.
        cpp: The implementation for CPUs.
        needs: The C++ function that `cpp` calls.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        *,
        triton: Callable[P, R] | None = None,
        cpp: Callable[P, R] | None = None,
        needs: CppFunction | None = None,
    ) -> None:
        self.name = name
        self.reference = reference
        self.triton = triton
        self.cpp = cpp
        self._needs = needs

    def on(self, tensor: Tensor) -> Callable[P, R]:
        """The implementation for the device of `tensor`."""
        return self.on_gpu if tensor.is_cuda else self.on_cpu

    # Cached, because operations of a few microseconds run several times per step.

    @cached_property
    def on_gpu(self) -> Callable[P, R]:
        """The implementation for tensors on a GPU."""
        if self.triton is None or triton is None or is_reference_forced():
            return self.reference
        return self.triton

    @cached_property
    def on_cpu(self) -> Callable[P, R]:
        """The implementation for tensors on the CPU."""
        if self.cpp is None or is_reference_forced() or not self.is_cpp_available:
            return self.reference
        return self.cpp

    @property
    def is_cpp_available(self) -> bool:
        """Whether the C++ implementation is shipped or could be compiled."""
        return self._needs is not None and self._needs.is_available
