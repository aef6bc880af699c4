"""KV slots in SGLang: how many a draft tree reserves, and in which pools they can be moved."""

from __future__ import annotations

from pathlib import Path

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
