"""When vLLM's engine core lets its workers prime, and in which blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec

from drafttree.vllm.chains.runner import ChainRunner
from drafttree.vllm.engine_priming import prime_until_work
from drafttree.vllm.priming import MAX_TOKENS


class Core:
    """An engine core without work, whose workers need two steps for all that there is."""

    def __init__(self, blocks: int, wanted: int) -> None:
        self.pool = BlockPool(blocks, True, 16)
        manager = SimpleNamespace(block_pool=self.pool)
        self.scheduler = SimpleNamespace(kv_cache_manager=manager)
        self.input_queue = SimpleNamespace(empty=lambda: True)
        self.lent: list[list[int]] = []
        self._wanted = wanted

    def is_running(self) -> bool:
        return True

    def is_sleeping(self) -> bool:
        return False

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if name == "drafttree_priming_blocks":
            return [self._wanted]
        self.lent.append(*args)
        return [(len(self.lent), 2)]


def test_blocks_are_lent_until_all_is_primed() -> None:
    core: Any = Core(blocks=9, wanted=3)
    for _ in range(2):
        prime_until_work(core)
        assert [len(blocks) for blocks in core.lent] == [3, 3]
        assert core.pool.get_num_free_blocks() == 8


def test_the_whole_of_a_small_cache_is_lent() -> None:
    core: Any = Core(blocks=3, wanted=5)
    prime_until_work(core)
    assert [len(blocks) for blocks in core.lent] == [2, 2]


def test_priming_waits_while_sessions_hold_the_cache() -> None:
    """With too few blocks a worker would report that nothing is left to prime."""
    core: Any = Core(blocks=9, wanted=3)
    held = core.pool.get_new_blocks(7)
    prime_until_work(core)
    assert core.lent == []
    core.pool.free_blocks(held)
    prime_until_work(core)
    assert len(core.lent) == 2


@pytest.mark.parametrize(("split", "blocks"), [(128, MAX_TOKENS), (64, 0)])
def test_tables_are_not_primed_where_attention_splits_blocks(split: int, blocks: int) -> None:
    """FlashMLA has blocks of 64 tokens, whose numbers are others than those of the cache."""
    spec = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    builder = SimpleNamespace(kv_cache_spec=spec.copy_with_new_block_size(split))
    runner: Any = ChainRunner.__new__(ChainRunner)
    runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    runner.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda _: builder)]]
    assert runner.priming_blocks() == blocks
