"""A draft model's forwards, in piecewise CUDA graphs where the target has them.

vLLM compiles a draft model as it does a target: in pieces between the layers of attention. Each
piece captures a graph when it first runs in a forward context that asks for one, and replays it in
contexts of the same description from then on. The engine captures graphs of the target for some
numbers of rows, and right before each of them one of the draft model is captured. Attention stays
outside, so it sees a step's own rows alone, whatever their number is padded to.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context

from drafttree.vllm.drafters.step_parts import other_model


class DraftGraphs:
    """Runs a draft model within the engine's forward contexts.

    Args:
        model: The draft model.
        max_rows: Greatest number of rows of a step.
        device: Where the model is.
    """

    def __init__(self, model: Any, max_rows: int, device: torch.device) -> None:
        self._model = model
        # Graphs read these, as the engine's read its own.
        self._input_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._captures = device.type == "cuda" and _is_compiled(model)
        self._has_run = False
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
                self._before_dummy(inputs["input_ids"], inputs["positions"])

        if self._captures:
            target.register_forward_pre_hook(before, with_kwargs=True)

    def _before_dummy(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Take part in a forward of the target that serves no request."""
        if not self._has_run:
            # The engine measures its memory, before any graph. Pieces that were compiled later,
            # while it measures graphs, would capture theirs in the wrong pool of memory.
            self._has_run = True
            with other_model():
                self._model(input_ids=input_ids, positions=positions)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE:
            return  # in the others nothing is captured, or all of the target in one graph
        descriptor = context.batch_descriptor
        assert descriptor is not None
        size = descriptor.num_tokens
        if size not in self._descriptors:  # with adapters the target has several graphs of a size
            self._run(size, None)  # kernels are compiled and tuned
            self._run(size, descriptor)
            insort(self._sizes, size)
            self._descriptors[size] = descriptor

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the model over some rows, whose attention metadata is in the forward context.

        Args:
            input_ids: Their tokens, `int [P]`.
            positions: Their positions, `int64 [P]`.

        Returns:
            Their states, `[P, d]`, until the next forward of any model.
        """
        # What is compiled keeps the number format of its first tokens, without a look at others.
        input_ids = input_ids.to(self._input_ids.dtype)
        rows = len(input_ids)
        place = bisect_left(self._sizes, rows)
        if place == len(self._sizes):
            with other_model():
                hidden: torch.Tensor = self._model(input_ids=input_ids, positions=positions)
            return hidden
        # The rows after these keep what was there: any token and position will do.
        self._input_ids[:rows].copy_(input_ids)
        self._positions[:rows].copy_(positions)
        size = self._sizes[place]
        return self._run(size, self._descriptors[size])[:rows]

    def _run(self, size: int, graphs: BatchDescriptor | None) -> torch.Tensor:
        """Run the model over the first `size` rows of the buffers."""
        with other_model(graphs):
            hidden: torch.Tensor = self._model(
                input_ids=self._input_ids[:size], positions=self._positions[:size]
            )
        return hidden


def _is_compiled(model: torch.nn.Module) -> bool:
    """Whether vLLM compiles the model, or a part of it, and so captures graphs of its pieces."""
    return any(not getattr(each, "do_not_compile", True) for each in model.modules())
