"""A process with a fake GPU, for the time of a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from interpreted import interpreted
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from fake_gpu import guard
from fake_gpu.record import place
from fake_gpu.tensors import DeviceMismatchError, DeviceTensor, Gpu, OnFakeGpu


@contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """Let this process have a GPU.

    Raises:
        ChangedInFlightError: Pinned memory changed while a copy was reading it.
    """
    guard.load()
    gpu = Gpu()

    class Event:
        """An event of the GPU's stream."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._copies = 0

        def record(self, *args: Any) -> None:
            """Complete with the copies that were started so far."""
            self._copies = gpu.copies.started

        def synchronize(self) -> None:
            """Wait for these copies, unless they have arrived."""
            if self._copies > gpu.copies.arrived:
                gpu.wait("an event", self._copies)

        def wait(self, *args: Any) -> None:
            """Let a stream wait; there is one."""

        def elapsed_time(self, end: Any) -> float:
            """Milliseconds up to another event; there are no times here."""
            return 1.0

    with ExitStack() as stack:
        for holder, name, value in (
            (torch, "Event", Event),
            (torch.cuda, "Event", Event),
            (torch.cuda, "current_stream", lambda *args: None),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "synchronize", lambda *args: gpu.wait("synchronize")),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        stack.enter_context(interpreted())
        stack.enter_context(_kernels_launched_on(gpu))
        # `torch.tensor(values, device="cuda")` then is a copy from the host.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        with OnFakeGpu(gpu):
            yield gpu
        gpu.copies.wait()


@contextmanager
def _kernels_launched_on(gpu: Gpu) -> Iterator[None]:
    """Let the interpreter take the memory of device tensors, and of no others."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        def address(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
                raise DeviceMismatchError(
                    f"kernel {self.__name__} of a host tensor {[*value.shape]} at {place()}"
                )
            return value.host if isinstance(value, DeviceTensor) else value

        given = [tree_map(address, each) for each in args]
        named = {key: tree_map(address, each) for key, each in kwargs.items()}
        gpu.record.launched(self.__name__)
        if gpu.graph is not None:
            gpu.graph.launched(lambda: run(self, *given, **named))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return run(self, *given, **named)

    with mock.patch.object(InterpretedFunction, "run", launch):
        yield
