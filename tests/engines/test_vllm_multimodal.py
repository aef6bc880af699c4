"""Multimodal models: tokens in vLLM with draft trees equal those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torchvision_stubs
import v2_on_cpu
from random_prompts import some_prompts
from tiny_families import IMAGE, make_tiny_family
from tiny_images import make_tiny_llava
from v2_on_cpu import LIMITS
from vllm_runs import Answer, Case, run_vllm

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.5, "max_tokens": 32, "ignore_eos": True}

TREES = {"method": "token_recycling", "memory": 0}

TEXT_ALONE = {"limit_mm_per_prompt": {"image": 0, "video": 0}}

WITH_IMAGES = {"skip_tokenizer_init": False}


@pytest.mark.parametrize("family", ["gemma3_vision", "llava", "qwen2_5_vl"])
def test_text_alone(
    family: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    model = make_tiny_family(family, tmp_path)
    cases = [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(4, seed=4), GREEDY, together=False),
        Case(some_prompts(8, seed=5), [SEEDED | {"seed": seed} for seed in range(8)]),
    ]
    environment = torchvision_stubs.ENVIRONMENT
    plain, _ = run_vllm(model, cases, None, environment, **TEXT_ALONE)
    drafted, _ = run_vllm(model, cases, TREES, environment, **TEXT_ALONE)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)


def with_images(count: int, seed: int) -> dict[str, Any]:
    """Prompts and images of a case: one of four requests has none."""
    prompts = some_prompts(count, seed=seed, longest=60)
    prompts = [[token % 250 + 2 for token in prompt] for prompt in prompts]
    images = [None if row % 4 == 3 else 10 * seed + row for row in range(count)]
    for row, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        if image is not None:
            prompt.insert(row % len(prompt), IMAGE)
    return {"prompts": prompts, "images": images}


def test_images(tmp_path: Path, proves_drafting: Callable[[Answer], None]) -> None:
    model = make_tiny_llava(tmp_path)
    cases = [
        Case(sampling=GREEDY, **with_images(8, 1)),
        Case(sampling=GREEDY, together=False, **with_images(4, 2)),
        Case(sampling=[SEEDED | {"seed": seed} for seed in range(8)], **with_images(8, 3)),
    ]
    environment = torchvision_stubs.ENVIRONMENT
    plain, _ = run_vllm(model, cases, None, environment, **WITH_IMAGES)
    drafted, _ = run_vllm(model, cases, TREES, environment, **WITH_IMAGES)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
