"""Lets vLLM's model runners read the logits of a few rows at a time, as they do with many rows of a
large vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLE = "TESTS_SMALL_CHUNKS"

ENVIRONMENT = {VARIABLE: "1"}

ROWS = 20
"""Rows of the vocabulary of a tiny model, 512 tokens, in float32 that exist at a time."""


SEVERAL = "logits were read in several chunks"
"""Line in the log of an engine whose V1 model runner did so."""


def enable() -> None:
    """Lower the limit."""
    from drafttree.vllm import step_logits

    step_logits.MAX_BYTES = ROWS * 512 * 4
    read = step_logits.StepLogits.chunks

    def chunks(self: step_logits.StepLogits) -> Iterator[tuple[slice, torch.Tensor]]:
        read_chunks = [*read(self)]
        if len(read_chunks) > 1:
            print(SEVERAL, flush=True)
        yield from read_chunks

    step_logits.StepLogits.chunks = chunks  # type: ignore[method-assign]
