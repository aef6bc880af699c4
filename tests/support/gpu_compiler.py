"""Compilation of kernels for A100s and H100s on any machine: Triton's compiler needs no device."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

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
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

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


def stack_bytes(kernel: Any) -> int:
    """Bytes of stack that each thread of a compiled kernel uses, for registers that it spills."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[-1])


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
