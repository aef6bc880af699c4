"""Forwards of a draft model within a step, in which all of the step's rows are read each time.

Attention that reads trees as a whole serves no part of a step, so a prompt in the same step is read
again with each level. The same KV is written again, and that of columns without a token yet is
written before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context


@contextmanager
def without_graphs() -> Iterator[None]:
    """The engine's forward context, in which another model than the target can run.

    Graphs were captured of the target alone: the engine would refuse to capture others now.
    """
    context = replace(get_forward_context(), cudagraph_runtime_mode=CUDAGraphMode.NONE)
    with override_forward_context(context):
        yield


class StepForwards:
    """The forwards of a draft model in one step; nothing waits for the device.

    Args:
        model: The draft model.
        rows: Place of each node among the step's tokens, `int [B, N]`.
        input_ids: Input tokens of the step, into which draft tokens are written.
        positions: Positions of these tokens.
        show: Lets attention apply the masks of the trees' first columns, given their parents.
    """

    def __init__(
        self,
        model: Any,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        show: Callable[[torch.Tensor], None],
    ) -> None:
        self._model = model
        self._rows = rows
        self._input_ids, self._positions = input_ids, positions
        self._show = show

    def read_roots(self) -> torch.Tensor:
        """Read all rows, and return the roots' states, `[B, d]`."""
        return self._forward()[self._rows[:, 0]]

    def read_level(self, first: int, parents: torch.Tensor) -> torch.Tensor:
        """Read all rows, the first columns of the trees among them.

        Args:
            first: The first column whose states are wanted.
            parents: Parents of the columns that have tokens, `int32 [B, last]`.

        Returns:
            The states of the columns from `first` on, `[B, last - first, d]`; those of columns that
            a request does not have are arbitrary.
        """
        self._show(parents)
        return self._forward()[self._rows[:, first : parents.shape[1]]]

    def _forward(self) -> torch.Tensor:
        with without_graphs():
            hidden: torch.Tensor = self._model(input_ids=self._input_ids, positions=self._positions)
        return hidden
