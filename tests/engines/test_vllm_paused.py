"""A request of vLLM that is left out of a step goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drafted_chains import VLLM_ENGINE
from random_prompts import some_prompts
from vllm_paused import run_paused

SEEDED = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True, "logprobs": 0}


@pytest.mark.parametrize("family", ["tiny_llama", "qwen3_next"])
def test_a_pause_between_two_steps(
    family: str, tiny_llama: Path, without_trees: Callable[[str], Path]
) -> None:
    """Recurrent layers find a request's state by how many drafts its last step has accepted.

    From another state the tokens of such a small model are often the same, but not their logprobs.
    """
    model = tiny_llama if family == "tiny_llama" else without_trees(family)
    method = {"method": "token_recycling", "nodes": 4}
    engine = VLLM_ENGINE.get(family, {})
    expected, found, accepted = run_paused(model, some_prompts(2), SEEDED, method, **engine)
    assert accepted >= 2
    assert len(expected[0]) == 40
    assert found == expected
