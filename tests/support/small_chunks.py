"""Lets the V2 model runner sample a few rows at a time, as it does with many rows of a large
vocabulary."""

from __future__ import annotations

VARIABLE = "TESTS_SMALL_CHUNKS"

ENVIRONMENT = {VARIABLE: "1"}

ROWS = 20
"""Rows of the vocabulary of a tiny model, 512 tokens, that are sampled at a time."""


def enable() -> None:
    """Lower the limit."""
    from drafttree.vllm.v2 import sampling

    sampling.MAX_COPY_BYTES = ROWS * 512 * 4
