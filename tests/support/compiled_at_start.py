"""Records which programs a GPU would compile after an engine's start, on a CPU.

Triton compiles a kernel for each set of its compile-time constants. In Triton's interpreter the
launches show them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton_on_cpu

VARIABLE = "TESTS_COMPILED_AT_START"

ENVIRONMENT = {VARIABLE: "1", **triton_on_cpu.ENVIRONMENT}

_OPTIONS = ("num_warps", "num_stages")

SERVED, LATER = "programs compiled at the start:", "compiled while serving:"
"""What lines in the engine's log begin with."""


def is_constant(kernel: Any, name: str) -> bool:
    """Whether an argument of a kernel is known when it is compiled."""
    return name in _OPTIONS or "constexpr" in str(kernel.__annotations__.get(name))


def specialised(value: Any) -> str:
    """What Triton compiles in of an argument that changes."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}, {'aligned' if value.data_ptr() % 16 == 0 else 'not aligned'}"
    if isinstance(value, int):
        return "1" if value == 1 else "a multiple of 16" if value % 16 == 0 else "an integer"
    return type(value).__name__


def enable() -> None:
    """Let the V2 worker compile at the start as on a GPU, and print what is compiled later."""
    from triton.runtime.interpreter import InterpretedFunction

    from drafttree.vllm.v2.cpu_worker import TreeCPUWorkerV2

    triton_on_cpu.use_for_all_operations()
    programs: set[tuple[str, str]] = set()
    started = False
    launch = InterpretedFunction.run

    def launch_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("tree_kernels."):
            of_all = dict(zip(self.arg_names, args, strict=False)) | kwargs
            constants = {
                name: value if is_constant(self.fn, name) else specialised(value)
                for name, value in of_all.items()
                if name not in (*self.kwargs.get("do_not_specialize", ()), "grid", "warmup")
            }
            program = self.fn.__name__, repr(sorted(constants.items()))
            if started and program not in programs:
                print(LATER, *program)
            programs.add(program)
        return launch(self, *args, **kwargs)

    start = TreeCPUWorkerV2.compile_or_warm_up_model

    @functools.wraps(start)
    def start_and_compile(self: Any) -> Any:
        nonlocal started
        times = start(self)
        assert self.compile_drafting()
        started = True
        print(SERVED, len(programs))
        return times

    InterpretedFunction.run = launch_and_record
    TreeCPUWorkerV2.compile_or_warm_up_model = start_and_compile  # type: ignore[method-assign]
