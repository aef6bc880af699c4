"""Multimodal models: tokens in vLLM with draft trees equal those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qwen_images
from random_prompts import some_prompts
from tiny_families import IMAGE, IMAGE_BEYOND, make_tiny_family
from tiny_images import make_tiny_llava, make_tiny_qwen
from v2_on_cpu import LIMITS, check_runner, for_runner
from vllm_runs import Answer, Case, run_vllm

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.5, "max_tokens": 32, "ignore_eos": True}

# Copies of the first answers would take the place of branches.
TREES = {"method": "token_recycling", "memory": 0}

NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}

# The tower of an image is on: all tokens reach the model as embeddings, those of texts too.
IMAGES = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}

RUNNERS: dict[str, dict[str, Any]] = {"v1": {}, "v2": LIMITS}
"""Settings by model runner; on V2 prompts are read in chunks, images among them."""


def equal_plain_decoding(
    model: Path,
    cases: list[Case],
    runner: str,
    proves_drafting: Callable[[Answer], None],
    **engine: Any,
) -> list[Answer]:
    """Serve cases without draft trees and with them; the answers must be equal."""
    environment = qwen_images.ENVIRONMENT | for_runner(runner)
    settings = RUNNERS[runner] | engine
    trees = TREES | ({"nodes": 15} if runner == "v2" else {})
    plain, log = run_vllm(model, cases, None, environment, **settings)
    check_runner(runner, log)
    drafted, log = run_vllm(model, cases, trees, environment, **settings)
    check_runner(runner, log)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    return plain


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", ["gemma3_vision", "qwen2_5_vl"])
def test_text_alone(
    family: str, runner: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    cases = [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(2, seed=4), GREEDY, together=False),
        Case(some_prompts(8, seed=5), [SEEDED | {"seed": seed} for seed in range(8)]),
    ]
    model = make_tiny_family(family, tmp_path)
    equal_plain_decoding(model, cases, runner, proves_drafting, **NO_IMAGES)


MODELS = {"llava": (make_tiny_llava, IMAGE_BEYOND), "qwen2_5_vl": (make_tiny_qwen, IMAGE)}
"""Models that see images, and the token that stands for an image in a prompt."""


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", MODELS)
def test_images(
    family: str, runner: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    make, placeholder = MODELS[family]
    first = with_images(placeholder, 8, 1)
    others = [seed and seed + 100 for seed in first["images"]]
    seeded = [SEEDED | {"seed": seed} for seed in range(8)]
    cases = [
        Case(sampling=GREEDY, **first),
        Case(sampling=GREEDY, **first | {"images": others}),
        Case(sampling=GREEDY, together=False, **with_images(placeholder, 2, 2)),
        Case(sampling=seeded, **with_images(placeholder, 8, 3)),
    ]
    plain = equal_plain_decoding(make(tmp_path), cases, runner, proves_drafting, **IMAGES)
    # The model sees its images.
    assert plain[0].tokens != plain[1].tokens


def with_images(placeholder: int, count: int, seed: int) -> dict[str, Any]:
    """Prompts and images of a case: one request of four has none."""
    prompts = [
        [2 + token % 250 for token in prompt] for prompt in some_prompts(count, seed, longest=60)
    ]
    images = [None if row % 4 == 3 else 10 * seed + row for row in range(count)]
    for row, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        if image is not None:
            prompt.insert(row % len(prompt), placeholder)
    return {"prompts": prompts, "images": images}
