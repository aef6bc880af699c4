"""The trees of a step on their way to the host, where the scheduler masks their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from drafttree.transfer import AsyncHostCopy
from drafttree.tree import NO_TOKEN
from drafttree.vllm.structured.shapes import Drafted

if TYPE_CHECKING:
    from tree_kernels.scheduled_trees import Layout
    from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass(frozen=True)
class StepDrafts:
    """The trees of a batch, which the device may still be computing.

    Attributes:
        names: The batch's requests.
        packed: Copy of tokens and parents, `int32 [B, 2 N]`.
    """

    names: Sequence[str]
    packed: AsyncHostCopy

    @classmethod
    def of(cls, batch: InputBatch, step: Layout) -> StepDrafts:
        """Start copying a step's trees to the host, without waiting for them."""
        tokens = batch.input_ids[step.place_of_node].int()
        packed = torch.cat((tokens.masked_fill(step.parents < 0, NO_TOKEN), step.parents), 1)
        return cls(tuple(batch.req_ids), AsyncHostCopy.of(packed))

    def by_request(self) -> dict[str, Drafted]:
        """The trees by request; waits for the device."""
        tokens, parents = self.packed.wait().chunk(2, 1)
        rows = zip(self.names, tokens.tolist(), parents.tolist(), strict=True)
        return {name: Drafted(of_nodes, above) for name, of_nodes, above in rows}
