"""Compilation of kernels for A100s and H100s on any machine: Triton's compiler needs no device."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import pytest
import triton
from tree_kernels._dispatch import Op
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Greatest number of bytes of shared memory that a program can use, by compute capability: those of
an A100 and of a Hopper GPU."""


class _Driver:
    """The parts of a driver that the compiler uses."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Compiled kernels are kept by device, so each capability is a device of its own.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiled:
    """The kernels that were launched, and so compiled.

    Attributes:
        names: The name of the kernel of each launch.
        kernels: The compiled kernel of each launch; launches of one program share one object.
    """

    names: list[str] = field(default_factory=list)
    kernels: list[Any] = field(default_factory=list)

    def programs(self) -> int:
        """The number of different programs."""
        return len({id(kernel) for kernel in self.kernels})


class Usage(NamedTuple):
    """What each thread of a compiled kernel uses.

    Attributes:
        registers: Number of registers.
        stack: Bytes of stack, for registers that it spills.
    """

    registers: int
    stack: int


def usage(kernel: Any) -> Usage:
    """What each thread of a compiled kernel uses."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        printed = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", printed)[-1]
    return Usage(int(registers), int(stack))


@contextmanager
def compile_only(capability: int = 90) -> Iterator[Compiled]:
    """Treat CPU tensors as CUDA tensors, and compile kernels instead of launching them.

    Args:
        capability: The GPU's compute capability.
    """
    compiled = Compiled()
    run = JITFunction.run

    def compile_it(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kw: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kw)
        compiled.names.append(self.fn.__name__)
        compiled.kernels.append(kernel.result() if hasattr(kernel, "result") else kernel)
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_it)
        patch.setattr(Op, "on_cpu", property(lambda op: op.triton or op.reference))
        # Triton cannot deactivate a driver, so the attribute is patched.
        patch.setattr(driver, "_active", _Driver(capability))
        yield compiled
