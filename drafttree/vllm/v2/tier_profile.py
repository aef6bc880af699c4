"""Measures the target's forwards at the start, for the scheduler that chooses tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger

from drafttree.budget import measure_forwards
from drafttree.vllm.forward import dummy_run_seconds

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


def forward_seconds_by_rows(runner: Any, max_rows: int) -> Mapping[int, float]:
    """Seconds of a forward, logits included, by the number of its tokens.

    Each token is a request of its own, so that any number can be measured while the KV cache is
    empty; what trees cost beyond that is learned from the first steps.

    Args:
        runner: The worker's V2 model runner.
        max_rows: Greatest number of rows of a step that have logits.

    Returns:
        The measurements; a guess that all forwards take equally long if there are none.
    """
    try:
        return measure_forwards(
            lambda tokens: dummy_run_seconds(runner, tokens, randomize_inputs=True), max_rows
        )
    except Exception as error:
        # Models differ, and an engine must not fail to start because a measurement failed.
        logger.warning("The model's forwards cannot be timed: %s", error)
        return {1: 0.01}
