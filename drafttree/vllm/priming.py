"""A worker's part of priming in vLLM: a drafter's forwards outside of steps.

The engine core calls all workers, as for a step (`drafttree.vllm.engine_priming`): all ranks run
the same forwards in the same order, and the first one decides which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from drafttree.drafter import ModelFreeDrafter
from drafttree.tensor_parallel import prime_ranks
from drafttree.vllm.forward import child_logits, next_logits

MAX_TOKENS = 64
"""Greatest number of tokens of a forward. More are no faster on a CPU, and their logits take more
memory."""


def prime(
    runner: Any, drafter: ModelFreeDrafter, blocks: Sequence[int], *, idle: bool
) -> tuple[int, int]:
    """Let a drafter compute beforehand what it can, on all ranks at once.

    Args:
        runner: The worker's model runner.
        drafter: This rank's drafter.
        blocks: Blocks of the KV cache that nothing else uses.
        idle: See `ModelFreeDrafter.prime`.

    Returns:
        The progress that the first rank's drafter reports.
    """
    size = min(group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups)
    builders = (each.get_metadata_builder(0) for groups in runner.attn_groups for each in groups)
    most_nodes = [each.max_nodes for each in builders if each.max_nodes is not None]
    # `MAX_TOKENS` does not count the root.
    max_nodes = min(
        1 + MAX_TOKENS,
        len(blocks) * size,
        runner.scheduler_config.max_num_batched_tokens,
        *most_nodes,
    )
    max_tokens = max_nodes - 1
    if max_tokens < 1:
        return 0, 0

    def forward(root: int | None, tokens: torch.Tensor) -> torch.Tensor:
        return child_logits(runner, root, tokens, blocks)

    return prime_ranks(drafter, forward, max_tokens, get_tp_group(), runner.device, idle=idle)


def prime_without_trees(
    runner: Any, drafter: ModelFreeDrafter, blocks: Sequence[int], *, idle: bool
) -> tuple[int, int]:
    """Like `prime`, for attention that verifies no trees: each token is a request of its own.

    Args:
        runner: The worker's model runner, whose layers all have attention.
        drafter: This rank's drafter.
        blocks: Blocks of the KV cache that nothing else uses, one for each token.
        idle: See `ModelFreeDrafter.prime`.
    """
    scheduler = runner.scheduler_config
    max_tokens = min(
        MAX_TOKENS, len(blocks), scheduler.max_num_batched_tokens // 2, scheduler.max_num_seqs
    )
    if max_tokens < 1:
        return 0, 0

    def forward(root: int | None, tokens: torch.Tensor) -> torch.Tensor:
        return next_logits(runner, root, tokens, blocks)

    return prime_ranks(drafter, forward, max_tokens, get_tp_group(), runner.device, idle=idle)


def blocks_for_priming(block_size: int) -> int:
    """Number of blocks that the largest forward over a tree needs."""
    return -(-(MAX_TOKENS + 1) // block_size)
