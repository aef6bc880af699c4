"""Where forwards that drafttree makes itself write their KV."""

from __future__ import annotations

from typing import Any


def plan_kv_writes(runner: Any, batch: Any) -> None:
    """Give a batch its KV slots in all of SGLang's pools, as SGLang does with its own batches.

    Where layers with sliding windows have a pool of their own, its slots follow from the others.

    Args:
        runner: The model's runner.
        batch: SGLang's forward batch, with the slots in `out_cache_loc`.
    """
    # Versions before 0.5.23 may not have it.
    translator = getattr(runner, "kv_index_translator", None)
    bind = getattr(translator, "bind_own_plan", None)
    if bind is not None:
        bind(batch)
