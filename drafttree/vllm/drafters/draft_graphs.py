"""A draft model's forwards, in piecewise CUDA graphs where the target has them.

vLLM compiles a draft model as it does a target: in pieces between the layers of attention. Each
piece captures a graph when it first runs in a forward context that asks for one, and replays it in
contexts of the same description from then on. Attention stays outside, so it sees a step's own rows
alone, whatever their number is padded to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import BatchDescriptor

from drafttree.vllm.drafters.step_parts import other_model
from drafttree.vllm.drafters.target_graphs import TargetGraphs, is_compiled


class DraftGraphs(TargetGraphs):
    """Runs a draft model within the engine's forward contexts.

    Args:
        model: The draft model.
        max_rows: Greatest number of rows of a step.
        device: Where the model is.
    """

    def __init__(self, model: Any, max_rows: int, device: torch.device) -> None:
        super().__init__()
        self._model = model
        # Graphs read these, as the engine's read its own.
        self._input_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._is_compiled = is_compiled(model)
        self._has_run = False

    def capture_with(self, target: torch.nn.Module, serves: Callable[[], bool]) -> None:
        """Take part in the target's forwards that serve no request, if the model is compiled.

        It is compiled in the first of them, rather than while a request waits, and its graphs are
        captured right before those of the target.
        """
        if self._is_compiled:
            super().capture_with(target, serves)

    def _before_dummy(self, inputs: dict[str, Any]) -> None:
        if not self._has_run:
            # The engine measures its memory, before any graph. Pieces that were compiled later,
            # while it measures graphs, would capture theirs in the wrong pool of memory.
            self._has_run = True
            with other_model():
                self._model(input_ids=inputs["input_ids"], positions=inputs["positions"])
        super()._before_dummy(inputs)

    def _capture(self, descriptor: BatchDescriptor) -> None:
        self._run(descriptor.num_tokens, None)  # kernels are compiled and tuned
        self._run(descriptor.num_tokens, descriptor)

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
        graphs = self._graphs_for(rows)
        if graphs is None:
            with other_model():
                hidden: torch.Tensor = self._model(input_ids=input_ids, positions=positions)
            return hidden
        # The rows after these keep what was there: any token and position will do.
        self._input_ids[:rows].copy_(input_ids)
        self._positions[:rows].copy_(positions)
        return self._run(graphs.num_tokens, graphs)[:rows]

    def _run(self, size: int, graphs: BatchDescriptor | None) -> torch.Tensor:
        """Run the model over the first `size` rows of the buffers."""
        with other_model(graphs):
            hidden: torch.Tensor = self._model(
                input_ids=self._input_ids[:size], positions=self._positions[:size]
            )
        return hidden
