"""vLLM's piecewise CUDA graphs on the fake GPU: captured by its own wrapper, in its own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.compilation import cuda_graph, monitor
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, ForwardContext, override_forward_context
from vllm.platforms import current_platform

from fake_gpu.graphs import cuda_graphs
from fake_gpu.tensors import Gpu


@contextmanager
def vllm_graphs(gpu: Gpu) -> Iterator[None]:
    """Let vLLM capture graphs on the fake GPU."""
    with ExitStack() as stack:
        stack.enter_context(cuda_graphs(gpu))
        for holder, name, value in (
            (cuda_graph, "weak_ref_tensors", lambda tensors: tensors),
            (type(current_platform), "get_global_graph_pool", lambda self: (0, 0)),
            (monitor, "cudagraph_capturing_enabled", True),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        yield


def piece(function: Callable[..., Any]) -> CUDAGraphWrapper:
    """A piece of a model, as vLLM wraps what it has compiled."""
    config: Any = SimpleNamespace(compilation_config=None, use_cumem_cudagraph_pool=False)
    wrapper = CUDAGraphWrapper(function, config, CUDAGraphMode.PIECEWISE)
    wrapper.is_debugging_mode = True  # it checks that inputs are where they were
    return wrapper


def context(mode: CUDAGraphMode, size: int) -> Any:
    """The forward context of a dummy batch of `size` rows."""
    descriptor = BatchDescriptor(size)
    return override_forward_context(
        ForwardContext({}, None, {}, cudagraph_runtime_mode=mode, batch_descriptor=descriptor)  # type: ignore[arg-type]
    )


def capture(runner: Any, most: int, sizes: Sequence[int]) -> None:
    """Do what the engine does when it starts: measure a step, then graphs, and capture them all.

    Args:
        runner: The model runner, with its models.
        most: Most tokens of a step.
        sizes: Numbers of rows for which graphs are captured, the largest first.
    """

    def run(mode: CUDAGraphMode, size: int) -> None:
        with context(mode, size):
            runner.get_model()(
                input_ids=torch.zeros(size, dtype=torch.int32, device=runner.device),
                positions=torch.zeros(size, dtype=torch.int64, device=runner.device),
            )

    run(CUDAGraphMode.NONE, most)
    for captured in (sizes[:2], sizes):
        CUDAGraphWrapper.clear_all_graphs()
        runner.initialize_kv_cache(None, is_profiling=True)
        for size in captured:
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
                run(mode, size)
        for size in captured:
            run(CUDAGraphMode.FULL, size)
    monitor.set_cudagraph_capturing_enabled(False)
