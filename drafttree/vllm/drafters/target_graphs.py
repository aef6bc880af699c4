"""CUDA graphs of a drafter's model or layer, captured beside the target's piecewise ones.

The engine captures piecewise graphs of the target for some numbers of rows. Right before each of
them, those of the drafter are captured for as many. Where the engine captures none, with
`enforce_eager` or for whole steps alone, the drafter has none either.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context


class TargetGraphs:
    """Base class of graphs that are captured beside those of the target."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._descriptors: dict[int, BatchDescriptor] = {}

    def forget(self) -> None:
        """The engine drops its graphs: those with which it has measured their memory."""
        self._sizes.clear()
        self._descriptors.clear()

    def capture_with(self, target: torch.nn.Module, serves: Callable[[], bool]) -> None:
        """Capture graphs right before the engine captures those of the target.

        Args:
            target: The target, which the engine calls as a module.
            serves: Whether it is called to serve requests.
        """

        def before(_: Any, args: Any, inputs: dict[str, Any]) -> None:
            if not serves():
                self._before_dummy(inputs)

        target.register_forward_pre_hook(before, with_kwargs=True)

    def _before_dummy(self, inputs: dict[str, Any]) -> None:
        """Take part in a forward of the target that serves no request."""
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE:
            return  # in the others nothing is captured, or all of the target in one graph
        descriptor = context.batch_descriptor
        assert descriptor is not None
        size = descriptor.num_tokens
        if size not in self._descriptors:  # with adapters the target has several graphs of a size
            self._capture(descriptor)
            insort(self._sizes, size)
            self._descriptors[size] = descriptor

    def _capture(self, descriptor: BatchDescriptor) -> None:
        """Capture graphs for as many rows as the target's next one has."""
        raise NotImplementedError

    def _graphs_for(self, rows: int) -> BatchDescriptor | None:
        """The smallest graphs that have so many rows; None if all have fewer."""
        place = bisect_left(self._sizes, rows)
        return None if place == len(self._sizes) else self._descriptors[self._sizes[place]]


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether vLLM compiles the model, or a part of it, and so captures graphs of its pieces."""
    return any(not getattr(each, "do_not_compile", True) for each in model.modules())
