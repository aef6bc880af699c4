"""What SGLang's forwards over text give to a multimodal target, and its prompts to a drafter."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch

from drafttree.sglang.model_inputs import (
    text_without_placeholders,
    use_text_positions,
    without_placeholders,
)

HASH = 1_000_000 + (1 << 61) + 7
"""What stands for an image; its last 32 bits are those of a small number."""


def config(*, multimodal: bool) -> Any:
    return SimpleNamespace(is_multimodal=multimodal, vocab_size=10)


def test_what_stands_for_images_is_not_shown_to_drafters() -> None:
    ids = torch.tensor([3, HASH, 9, 10])
    read = without_placeholders(config(multimodal=True), ids)
    assert (read.tolist(), read.dtype) == ([3, 0, 9, 0], torch.int32)
    # SGLang writes other ids over the given ones.
    ids[:] = 5
    assert read.tolist() == [3, 0, 9, 0]
    assert without_placeholders(config(multimodal=False), ids).tolist() == [5] * 4


def test_texts_of_requests() -> None:
    request = SimpleNamespace(origin_input_ids=array("q", [3, HASH, 9]), output_ids=[4, 5])
    assert text_without_placeholders(config(multimodal=True), request) == [3, 0, 9, 4, 5]
    assert text_without_placeholders(config(multimodal=False), request) == [3, HASH, 9, 4, 5]


def test_positions_of_text_in_three_dimensions() -> None:
    positions = torch.tensor([5, 6, 6])
    for mrope in (False, True):
        runner = SimpleNamespace(model_config=SimpleNamespace(model_is_mrope=mrope))
        batch = SimpleNamespace(positions=positions, mrope_positions=None)
        use_text_positions(runner, batch)
        assert (batch.mrope_positions is not None) == mrope
    assert batch.mrope_positions.tolist() == [positions.tolist()] * 3
