"""CUDA graphs on the fake GPU: what was launched while one was captured is launched again.

As on a GPU, a replay runs none of Python's code, reads and writes the same memory as the capture,
and nothing may wait or copy from the host meanwhile. The memory of two graphs is never shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fake_gpu.tensors import Gpu


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._launches: list[Callable[[], None]] = []
        self.gpu: Gpu | None = None

    def operated(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Note an operation of PyTorch, on tensors of the host's that hold the values."""
        written = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]

        def again() -> None:
            for old, new in zip(written, tree_leaves(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._launches.append(again)

    def launched(self, again: Callable[[], None]) -> None:
        """Note the launch of a kernel."""
        self._launches.append(again)

    def replay(self) -> None:
        """Launch everything again."""
        assert self.gpu is not None, "nothing was captured"
        self.gpu.record.launched("graph")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for again in self._launches:
                again()

    def reset(self) -> None:
        """Forget what was captured."""
        self._launches.clear()


@contextmanager
def _capture(cuda_graph: Graph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """In place of `torch.cuda.graph`."""
    gpu = _current[-1]
    assert gpu.graph is None, "one graph is captured at a time"
    cuda_graph.gpu, gpu.graph = gpu, cuda_graph
    try:
        yield
    finally:
        gpu.graph = None


_current: list[Gpu] = []


@contextmanager
def cuda_graphs(gpu: Gpu) -> Iterator[None]:
    """Let PyTorch capture graphs on the fake GPU."""
    properties = SimpleNamespace(is_integrated=False, major=9, minor=0)
    with ExitStack() as stack:
        for name, value in {
            "CUDAGraph": Graph,
            "graph": _capture,
            "graph_pool_handle": lambda: (0, 0),
            "stream": lambda stream: nullcontext(),
            "Stream": lambda *given, **named: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "empty_cache": lambda: None,
            "get_device_properties": lambda *given: properties,
            "mem_get_info": lambda *given: (8 << 30, 16 << 30),
            "is_current_stream_capturing": lambda: gpu.graph is not None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        _current.append(gpu)
        stack.callback(_current.pop)
        yield
