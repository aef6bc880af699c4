"""Priming in vLLM: a drafter's forwards outside of steps, at start-up and between requests.

An engine core without requests waits for messages in its own process, and workers wait for its
calls. So the engine core calls the workers, as for a step: all ranks run the same forwards in the
same order, and the first one decides which. It lends them blocks of the KV cache for each call, so
that no request and no cached prefix has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from drafttree.drafter import ModelFreeDrafter
from drafttree.tensor_parallel import prime_ranks
from drafttree.vllm.forward import child_logits, next_logits

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")

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
    max_tokens = min(
        MAX_TOKENS, len(blocks) * size - 1, runner.scheduler_config.max_num_batched_tokens - 1
    )
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


_finished: WeakSet[EngineCoreProc] = WeakSet()


def prime_until_work(core: EngineCoreProc) -> None:
    """Let the workers of an engine core that has no work prime until a message arrives."""
    while (
        core not in _finished
        and core.is_running()
        and core.input_queue.empty()
        and not core.is_sleeping()
    ):
        progress = prime_once(core)
        if progress is None:
            return
        done, everything = progress
        if done == everything:
            _finished.add(core)


def prime_once(core: EngineCore) -> tuple[int, int] | None:
    """Let the workers of an engine core without requests prime in one short forward.

    Returns:
        How much is computed, and how much there is in all; None while the weights are missing.
    """
    # Blocks without a cached prefix come first, and go back to the front.
    pool = core.scheduler.kv_cache_manager.block_pool
    count: int = core.collective_rpc("drafttree_priming_blocks")[0]
    blocks = pool.get_new_blocks(min(count, pool.get_num_free_blocks()))
    try:
        numbers = [block.block_id for block in blocks]
        progress: tuple[int, int] | None
        progress = core.collective_rpc("drafttree_prime", args=(numbers,))[0]
    finally:
        pool.free_blocks(blocks)
    return progress
