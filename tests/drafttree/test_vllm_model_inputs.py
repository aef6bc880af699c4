"""What vLLM's runners give to a multimodal target in a forward over text, and to a drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttree.vllm.model_inputs import (
    rope_positions,
    text_inputs,
    text_without_placeholders,
    without_placeholders,
)

IDS = torch.tensor([3, 9, 10], dtype=torch.int32)
POSITIONS = torch.tensor([5, 6, 6])


def make_runner(*, media: bool, **further: Any) -> Any:
    return SimpleNamespace(
        supports_mm_inputs=media,
        model_config=SimpleNamespace(get_vocab_size=lambda: 10),
        model=SimpleNamespace(embed_input_ids=lambda ids: ids[:, None].float()),
        **further,
    )


def test_text_models_read_tokens() -> None:
    runner = make_runner(media=False)
    inputs = text_inputs(runner, IDS, POSITIONS)
    assert inputs == {"input_ids": IDS, "positions": POSITIONS, "inputs_embeds": None}
    assert without_placeholders(runner, IDS) is IDS
    assert text_without_placeholders(runner, [3, 11]) == [3, 11]


@pytest.mark.parametrize("v2", [False, True])
def test_multimodal_models_read_embeddings_at_positions_of_three_dimensions(v2: bool) -> None:
    buffer = torch.zeros(3, 8, dtype=torch.long)
    of_runner = {
        False: {"uses_mrope": True, "mrope_positions": SimpleNamespace(gpu=buffer)},
        True: {"model_state": SimpleNamespace(rope_state=SimpleNamespace(positions=buffer))},
    }[v2]
    runner = make_runner(media=True, **of_runner)
    assert rope_positions(runner) is buffer
    inputs = text_inputs(runner, IDS, POSITIONS)
    assert inputs["input_ids"] is None
    assert inputs["inputs_embeds"].tolist() == [[3], [9], [10]]
    assert inputs["positions"].tolist() == [POSITIONS.tolist()] * 3
    # A graph reads the engine's own buffer.
    assert inputs["positions"].data_ptr() == buffer.data_ptr()


def test_placeholders_beyond_the_vocabulary_are_not_shown_to_drafters() -> None:
    runner = make_runner(media=True)
    assert without_placeholders(runner, IDS).tolist() == [3, 9, 0]
    assert [*text_without_placeholders(runner, [3, 9, 10, 11])] == [3, 9, 0, 0]
