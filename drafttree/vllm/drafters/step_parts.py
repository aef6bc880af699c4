"""Forwards of a drafter's own layers over some of a step's rows.

The engine's forward context is that of all rows of a step. Layers that are read for a few of them
get metadata of these alone, made from tensors on the device, whose shapes the host knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from drafttree.vllm.step_masks import StepMasks


@contextmanager
def without_graphs(**changes: Any) -> Iterator[None]:
    """The engine's forward context, in which another model than the target can run.

    Graphs were captured of the target alone: the engine would refuse to capture others now.

    Args:
        **changes: Further fields of the context, and what they are.
    """
    changes["cudagraph_runtime_mode"] = CUDAGraphMode.NONE
    with override_forward_context(replace(get_forward_context(), **changes)):
        yield


class StepParts:
    """The parts of one step, for some of the engine's layers.

    Args:
        runner: The model runner, whose step is prepared.
        prefix: What the names of the layers begin with.
        caches: For each group of KV caches the blocks of the step's B requests, `int32 [B, P]`, and
            the slots of its rows, `int64 [T]`.
    """

    def __init__(
        self, runner: Any, prefix: str, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._longest: int = runner.max_model_len
        self._layers = [
            (group.get_metadata_builder(0), names, blocks, slots)
            for groups, (blocks, slots) in zip(runner.attn_groups, caches, strict=True)
            for group in groups
            if (names := [name for name in group.layer_names if name.startswith(prefix)])
        ]

    @contextmanager
    def reading(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        most: int,
        masks: StepMasks | None = None,
    ) -> Iterator[None]:
        """The forward context of some rows, in which the layers can run.

        Args:
            rows: Places of these rows in the step, those of one request after another, `int [P]`.
            starts: First of the rows of each request, and their number, `int32 [B + 1]`.
            lengths: Number of tokens of each request up to the last of its rows, `int [B]`.
            most: Greatest number of rows of a request.
            masks: Masks of the rows' trees; None if they are causal.
        """
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,  # read on a CPU alone
            seq_lens=lengths.int(),
            num_reqs=len(lengths),
            num_actual_tokens=len(rows),
            max_query_len=most,
            max_seq_len=self._longest,
            block_table_tensor=torch.empty(0),
            slot_mapping=rows,
        )
        metadata, slot_mapping = {}, {}
        for builder, names, blocks, slots in self._layers:
            here = common.replace(block_table_tensor=blocks, slot_mapping=slots[rows])
            metadata.update(dict.fromkeys(names, builder.build_part(here, masks)))
            slot_mapping.update(dict.fromkeys(names, here.slot_mapping))
        changes: dict[str, Any] = {"attn_metadata": metadata, "slot_mapping": slot_mapping}
        if hasattr(get_forward_context(), "is_padding"):
            changes["is_padding"] = None  # it would be that of the whole step
        with without_graphs(**changes):
            yield
