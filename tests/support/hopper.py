"""Compiles kernels for a Hopper GPU on a machine without one: Triton's compiler needs no device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import tree_kernels
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on a Hopper GPU."""


class _Driver:
    """As much of a driver as compiling takes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiled:
    """What was launched, and so compiled.

    Attributes:
        names: of the kernels, one a launch.
        kernels: what came of each launch; launches of one and the same program give one object.
    """

    names: list[str] = field(default_factory=list)
    kernels: list[Any] = field(default_factory=list)

    def programs(self) -> int:
        """How many different programs there are."""
        return len({id(kernel) for kernel in self.kernels})


@contextmanager
def compile_only() -> Iterator[Compiled]:
    """Take CPU tensors for CUDA ones; where a kernel would be launched it is only compiled."""
    compiled = Compiled()
    run = JITFunction.run

    def compile_it(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kw: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kw)
        compiled.names.append(self.fn.__name__)
        compiled.kernels.append(kernel.result() if hasattr(kernel, "result") else kernel)
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_it)
        for module in vars(tree_kernels).values():
            if isinstance(module, ModuleType) and hasattr(module, "use_triton"):
                patch.setattr(module, "use_triton", lambda tensor: True)
        # It has no way back where no driver is active.
        patch.setattr(driver, "_active", _Driver())
        yield compiled
