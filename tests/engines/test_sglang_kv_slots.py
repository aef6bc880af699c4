"""KV slots in SGLang: how many a draft tree reserves, and in which pools they can be moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_prompts import some_prompts
from sglang_runs import Case, run_sglang

GREEDY = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}


def test_a_draft_model_reserves_two_trees_a_request_whatever_the_page_size(
    tiny_llama: Path,
) -> None:
    """A whole page for each branch would be 256 slots, more than the pool has."""
    case = Case(some_prompts(4, shortest=20, longest=30), GREEDY, together=False)
    cramped = {"page_size": 16, "max_total_tokens": 160}
    (plain,), _ = run_sglang(tiny_llama, [case], drafted=False, **cramped)
    (drafted,), _ = run_sglang(
        tiny_llama,
        [case],
        {"tree": "beam:2x4"},
        method="rsd",
        draft_model=tiny_llama,
        **cramped,
    )
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0
    assert drafted.retractions == [0] * 4


def test_rows_of_a_pool_with_other_semantics_are_not_moved() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from drafttree.sglang.kv_cache import kv_movers

    class OtherPool(MHATokenToKVPool):  # type: ignore[misc]
        """Buffers of the same names, in which a token has other rows."""

    for kind in (MHATokenToKVPool, OtherPool):
        pool = kind.__new__(kind)
        pool.k_buffer = pool.v_buffer = [torch.zeros(8, 2, 16)]
        if kind is MHATokenToKVPool:
            assert kv_movers(pool)
        else:
            with pytest.raises(RuntimeError, match="OtherPool"):
                kv_movers(pool)


def test_rows_of_sliding_windows_move_in_a_pool_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # its other moves need a GPU
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from drafttree.sglang.kv_cache import kv_movers

    def filled() -> Any:
        torch.manual_seed(0)
        pool = SWAKVPool(
            size=15,
            size_swa=15,
            page_size=1,
            dtype=torch.float32,
            head_num=2,
            head_dim=8,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1],
            device="cpu",
        )
        for own in (pool.full_kv_pool, pool.swa_kv_pool):
            for buffer in (*own.k_buffer, *own.v_buffer):
                buffer.copy_(torch.randn(buffer.shape))
        pool.register_mapping(torch.randperm(16))
        return pool

    ours, theirs = filled(), filled()
    slots = torch.tensor([[3, 4, 5, 6], [9, 10, 11, 12]])
    path = torch.tensor([[0, 2, 3], [0, 1, -1]], dtype=torch.int32)
    for move in kv_movers(ours):
        move(slots, path)
    theirs.move_kv_cache(torch.tensor([4, 5]), torch.tensor([5, 6]))
    for layer in range(3):
        for found, expected in zip(
            ours.get_kv_buffer(layer), theirs.get_kv_buffer(layer), strict=True
        ):
            assert torch.equal(found, expected)
    assert not torch.equal(ours.get_key_buffer(0), filled().get_key_buffer(0))
