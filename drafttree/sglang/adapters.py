"""LoRA adapters in forwards that drafttree makes itself, which belong to no request."""

from __future__ import annotations

from typing import Any


def use_no_adapters(runner: Any, batch: Any) -> None:
    """Let LoRA layers compute all rows of a batch with the target's own weights.

    SGLang does the like where it makes a batch from requests; until the next batch its layers would
    take the rows of a forward for those of the last one.

    Args:
        runner: The target's model runner.
        batch: SGLang's forward batch, complete.
    """
    # Versions before 0.5.23, with which adapters are refused, have no manager without them.
    manager = getattr(runner, "lora_manager", None)
    if manager is not None:
        batch.lora_ids = [None] * batch.batch_size
        manager.prepare_lora_batch(batch)
