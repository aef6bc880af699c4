"""Rows of SGLang's table of KV slots that are long enough for a request at the context's end."""

from __future__ import annotations

from typing import Any

from drafttree.sglang.versions import unknown


def widen_request_rows() -> None:
    """Give rows room for all slots that the host reserves while it verifies.

    It reserves two trees beyond a request's tokens but, with pages of one token, makes rows longer
    than the context by one tree only, and then writes past a row's end. Called in the scheduler's
    process before its pools are made, once a method of ours is asked for.

    Raises:
        RuntimeError: this is not the SGLang that we know.
    """
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    original = getattr(kv_cache_configurator, "get_req_to_token_extra_context_len", None)
    if original is None:
        raise unknown("kv_cache_configurator has no get_req_to_token_extra_context_len")

    def get_req_to_token_extra_context_len(*given: Any) -> int:
        return max(original(*given), get_alloc_reserve_per_decode(*given))

    kv_cache_configurator.get_req_to_token_extra_context_len = get_req_to_token_extra_context_len
