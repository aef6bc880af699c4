"""The trees of one step of the V2 model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tree_kernels.scheduled_trees import Layout, lay_out

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from drafttree.vllm.v2.kept_trees import KeptTrees


def lay_out_step(batch: InputBatch, kept: KeptTrees, prompts: torch.Tensor) -> Layout:
    """Lay out the trees of a batch, and move its positions to theirs; the host waits for nothing.

    Args:
        batch: The engine's batch. Its positions change in place: graphs and the sampler read them.
        kept: The trees that were drafted.
        prompts: Number of tokens of each request's prompt, by row of the engine's state.
    """
    # The host knows how many drafts each request has, as it has scheduled them.
    counts = batch.num_draft_tokens_per_req
    return lay_out(
        batch.idx_mapping,
        batch.cu_num_logits,
        batch.seq_lens[: batch.num_reqs],
        prompts,
        kept.parents,
        batch.logits_indices,
        batch.positions,
        1 if counts is None else 1 + int(counts.max()),
    )
