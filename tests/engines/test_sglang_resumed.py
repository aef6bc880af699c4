"""Penalties of requests that SGLang has retracted, and LongRoPE's frequencies beside drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang

from drafttree.sglang.long_rope import last_short_position, tokens_left

GREEDY = {"temperature": 0.0, "max_new_tokens": 120, "ignore_eos": True}


def test_penalties_of_requests_that_were_retracted(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The token after the prompt that is read again is penalised for all that was emitted."""
    penalties: dict[str, Any] = {"repetition_penalty": 1.6, "frequency_penalty": 0.4}
    sampling = [GREEDY | (penalties if row % 2 else {"presence_penalty": 1.5}) for row in range(8)]
    case = Case(some_prompts(8, seed=8, shortest=20), sampling)
    # Where steps overlap, SGLang itself penalises later.
    (plain,), _ = run_sglang(tiny_llama, [case], drafted=False, disable_overlap_schedule=True)
    # SGLang then admits requests as if each would generate 16 tokens.
    (drafted,), _ = run_sglang(
        tiny_llama,
        [case],
        {"nodes": 8},
        variables={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
        max_total_tokens=700,
        schedule_conservativeness=0.01,
    )
    assert sum(drafted.retractions) > 2
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)


@pytest.fixture
def long_rope(tiny_llama: Path, tmp_path: Path) -> Path:
    """A model whose frequencies change after 64 tokens."""
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    half = config["head_dim"] // 2
    config |= {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
    }
    file.write_text(json.dumps(config))
    return tmp_path


@pytest.mark.full
def test_frequencies_that_change_within_an_answer(
    long_rope: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """SGLang rotates all rows of a step by the long frequencies if one is beyond 64 tokens."""
    prompts = some_prompts(6, seed=3, shortest=40, longest=60)
    case = Case(prompts, GREEDY | {"max_new_tokens": 60}, together=False)
    limits = {"context_length": 256}
    (plain,), _ = run_sglang(long_rope, [case], drafted=False, **limits)
    (drafted,), _ = run_sglang(long_rope, [case], {"nodes": 15}, **limits)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)


def test_trees_end_where_frequencies_change() -> None:
    lengths = torch.tensor([10, 62, 64, 65, 90])
    left = torch.tensor([8, 8, 8, 8, 0])
    assert tokens_left(64, left, lengths).tolist() == [8, 3, 1, 8, 0]
    assert last_short_position(torch.nn.Linear(2, 2)) is None
