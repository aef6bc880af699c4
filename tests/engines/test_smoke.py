"""Each engine starts once, drafts, and gives the model's own greedy tokens: `pytest -m smoke`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts

pytestmark = pytest.mark.smoke

TOKENS = 32
PROMPTS = some_prompts(6)


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    """The greedy tokens in PyTorch, without an engine."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    return [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def test_vllm_drafts_and_gives_the_models_tokens(
    tiny_llama: Path, expected: list[list[int]], proves_drafting: Callable[[Any], None]
) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed here")
    from vllm_runs import Case, run_vllm

    case = Case(PROMPTS, {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True})
    (answer,), _ = run_vllm(tiny_llama, [case], speculative={"method": "token_recycling"})
    assert [samples[0] for samples in answer.tokens] == expected
    proves_drafting(answer)


def test_sglang_drafts_and_gives_the_models_tokens(
    tiny_llama: Path, expected: list[list[int]], proves_drafting: Callable[[Any], None]
) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed here")
    from sglang_runs import Case, run_sglang

    case = Case(PROMPTS, {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True})
    (answer,), _ = run_sglang(tiny_llama, [case])
    assert answer.tokens == expected
    proves_drafting(answer)
