"""Runs with chains: what vLLM needs for them, and what their counters must say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VLLM_ENGINE: dict[str, dict[str, Any]] = {
    # The other backend, which the engine prefers on a CPU with AMX, needs bfloat16.
    "deepseek_v2": {"attention_backend": "CPU_MLA"},
    # The engine's CPU kernels for its linear attention need bfloat16, and verification is refused
    # with prefix caching there.
    "qwen3_next": {"dtype": "bfloat16", "enable_prefix_caching": False},
}
"""Arguments of vLLM's engine for tiny models without trees, by family."""


def proves_chains(counters: Mapping[str, int], longest: int) -> None:
    """Check that chains were verified, of several drafts, and that some drafts were accepted.

    Args:
        counters: The counters of the run.
        longest: Greatest number of draft tokens of a chain.
    """
    assert counters["accepted_tokens"] > counters["drafted_steps"] / 10 > 0
    assert counters["emitted"] == counters["steps"] + counters["accepted_tokens"]
    assert counters["draft_tokens"] <= longest * counters["drafted_steps"]
    assert counters["draft_tokens"] > 2 * counters["drafted_steps"]
    assert counters["non_first_child_accepted"] == counters["kv_rows_moved"] == 0
