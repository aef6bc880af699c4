"""The trees of one step of the V2 model runner."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from tree_kernels.scheduled_trees import Layout, lay_out

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from drafttree.vllm.v2.kept_trees import KeptTrees


_SHAPES = 64
"""How many shapes of steps keep their memory."""


class StepLayouts:
    """Lays out steps, in memory that later steps of the same shape use again.

    A layout is valid until the next step is laid out: by then nothing of it is needed any more, and
    the device runs the steps in order.

    Args:
        kept: The trees that were drafted.
    """

    def __init__(self, kept: KeptTrees) -> None:
        self._kept = kept
        # Allocation would be half of the host's time for a layout.
        empty = partial(Layout.empty, device=kept.parents.device)
        self._memory = lru_cache(maxsize=_SHAPES)(empty)

    def lay_out(self, batch: InputBatch, prompts: torch.Tensor) -> Layout:
        """Lay out the trees of a batch, and move its positions to theirs; the host waits for none.

        Args:
            batch: The engine's batch. Its positions change in place: graphs and the sampler read
                them.
            prompts: Number of tokens of each request's prompt, by row of the engine's state.
        """
        # The host knows how many drafts each request has, as it has scheduled them.
        counts = batch.num_draft_tokens_per_req
        width = 1 if counts is None else 1 + max(counts.tolist())
        rows, indices = batch.idx_mapping, batch.logits_indices
        return lay_out(
            rows,
            batch.cu_num_logits,
            batch.seq_lens[: batch.num_reqs],
            prompts,
            self._kept.parents,
            indices,
            batch.positions,
            width,
            self._memory(rows.shape[0], width, indices.shape[0]),
        )
