"""CUDA graphs of what is computed for each request of a step, for batches of several sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec

Tensors = tuple[torch.Tensor, ...]


def whole_steps_are_captured(device: torch.device) -> bool:
    """Whether SGLang captures whole graphs of the target, beside which others may be captured."""
    config = get_exec().graph.cuda_graph_config
    return device.type != "cpu" and config is not None and config.decode.backend == Backend.FULL


class RequestGraphs:
    """A computation for each request of a batch, of which graphs may be captured.

    Its inputs and results have one row for each request. A batch is padded to the number of
    requests of a graph, and the padding is zero: to SGLang's pools this is the slot of no request,
    whose KV is in no request's slots.

    Args:
        compute: The computation. Where it is captured, it neither waits nor copies from the host.
        lay_out: Makes its first argument from the shapes of the inputs, on the host.
    """

    def __init__(self, compute: Callable[..., Tensors], lay_out: Callable[..., Any]) -> None:
        self._compute, self._lay_out = compute, lay_out
        self._sizes: Sequence[int] = ()
        self._inputs: Sequence[torch.Tensor] = ()
        # With what was laid out, whose memory the graph reads.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors, Any]] = {}

    def capture(self, inputs: Sequence[torch.Tensor], requests: Sequence[int]) -> None:
        """Capture graphs.

        Args:
            inputs: Buffers of the inputs, zeros `[R, ...]` each.
            requests: Numbers of requests, ascending, R the last.
        """
        self._sizes, self._inputs = requests, inputs
        pool = torch.cuda.graph_pool_handle()
        # The smaller ones fit into the memory of the largest.
        for size in reversed(requests):
            self._graphs[size] = self._captured(size, pool)

    @torch.no_grad()
    def _captured(self, size: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensors, Any]:
        inputs = [each[:size] for each in self._inputs]
        laid_out = self._lay_out(*inputs)
        self._compute(laid_out, *inputs)  # kernels are compiled and tuned
        graph = torch.cuda.CUDAGraph()
        with (
            graph_capture() as context,
            torch.cuda.graph(graph, pool=pool, stream=context.stream),
        ):
            return graph, self._compute(laid_out, *inputs), laid_out

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Compute for one batch, with a graph if there is one of so many requests.

        Args:
            inputs: `[B, ...]` each. Other dimensions may be smaller than those of the buffers,
                which keep what they hold beyond.

        Returns:
            `[B, ...]` each, until the next call.
        """
        requests = len(inputs[0])
        place = bisect_left(self._sizes, requests)
        if place == len(self._sizes):
            return self._compute(self._lay_out(*inputs), *inputs)
        size = self._sizes[place]
        for buffer, given in zip(self._inputs, inputs, strict=True):
            buffer[tuple(map(slice, given.shape))].copy_(given)
            if size > requests:
                buffer[requests:size].zero_()
        graph, results, _ = self._graphs[size]
        graph.replay()
        return tuple(each[:requests] for each in results)
