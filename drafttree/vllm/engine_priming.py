"""The engine core's part of priming in vLLM: when workers prime, and in which blocks.

An engine core without requests waits for messages in its own process, and workers wait for its
calls. So the engine core calls the workers, as for a step. It lends them blocks of the KV cache for
each call, so that no request and no cached prefix has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

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
        How much is computed, and how much there is in all; None while the weights are missing, or
        too many blocks are held by requests that do not run, such as open sessions.
    """
    # Blocks without a cached prefix come first, and go back to the front.
    pool = core.scheduler.kv_cache_manager.block_pool
    count: int = core.collective_rpc("drafttree_priming_blocks")[0]
    # The engine keeps one block for itself.
    count = min(count, pool.num_gpu_blocks - 1)
    if pool.get_num_free_blocks() < count:
        return None
    blocks = pool.get_new_blocks(count)
    try:
        numbers = [block.block_id for block in blocks]
        progress: tuple[int, int] | None
        progress = core.collective_rpc("drafttree_prime", args=(numbers,))[0]
    finally:
        pool.free_blocks(blocks)
    return progress
