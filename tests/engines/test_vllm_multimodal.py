"""Multimodal models: tokens in vLLM with draft trees equal those without."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qwen_images
from engine_host.jobs import run_job
from random_prompts import some_prompts
from tiny_families import IMAGE, IMAGE_BEYOND, VOCABULARY, make_tiny_family
from tiny_images import make_tiny_llava, make_tiny_qwen
from top_tokens import check_primed
from v2_on_cpu import LIMITS, check_runner, for_runner
from vllm_configured import complaints
from vllm_runs import ENVIRONMENT, Answer, Case, run_vllm

# Copies of the first answers would take the place of branches.
TREES = {"method": "token_recycling", "memory": 0}

NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}

# The tower of an image is on: all tokens reach the model as embeddings, those of texts too.
IMAGES = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}

RUNNERS: dict[str, dict[str, Any]] = {"v1": {}, "v2": LIMITS}
"""Settings by model runner; on V2 prompts are read in chunks, images among them."""

SIZES = {"v1": (8, 40), "v2": (4, 20)}
"""Requests of a case and tokens of an answer by model runner; V2's kernels are interpreted."""


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


@pytest.mark.full
@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.full)])
@pytest.mark.parametrize("family", ["gemma3_vision", "qwen2_5_vl"])
def test_text_alone(
    family: str, runner: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    count, length = SIZES[runner]
    cases = [
        Case(some_prompts(count), greedy(length)),
        Case(some_prompts(2, seed=4), greedy(length), together=False),
        Case(some_prompts(count, seed=5), seeded(count, length)),
    ]
    model = make_tiny_family(family, tmp_path)
    equal_plain_decoding(model, cases, runner, proves_drafting, **NO_IMAGES)


MODELS = {"llava": (make_tiny_llava, IMAGE_BEYOND), "qwen2_5_vl": (make_tiny_qwen, IMAGE)}
"""Models that see images, and the token that stands for an image in a prompt."""


@pytest.mark.parametrize(
    ("family", "runner"),
    [
        ("llava", "v1"),
        pytest.param("llava", "v2", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "v1", marks=pytest.mark.full),
        ("qwen2_5_vl", "v2"),
    ],
)
def test_images(
    family: str, runner: str, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    make, placeholder = MODELS[family]
    count, length = SIZES[runner]
    first = with_images(placeholder, count, 1)
    others = [seed and seed + 100 for seed in first["images"]]
    cases = [
        Case(sampling=greedy(length), **first),
        Case(sampling=greedy(length), **first | {"images": others}),
        Case(sampling=greedy(length), together=False, **with_images(placeholder, 2, 2)),
        Case(sampling=seeded(count, length), **with_images(placeholder, count, 3)),
    ]
    plain = equal_plain_decoding(make(tmp_path), cases, runner, proves_drafting, **IMAGES)
    # The model sees its images.
    assert plain[0].tokens != plain[1].tokens


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_forwards_outside_of_steps(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Priming and the measurements at start give the model embeddings, and M-RoPE positions."""
    model, cache = make_tiny_qwen(tmp_path / "model"), tmp_path / "cache"
    options = TREES | {"nodes": "auto", "prime": True, "prime_seconds": math.inf}
    environment = qwen_images.ENVIRONMENT | {"DRAFTTREE_CACHE": str(cache)}
    cases = [Case(sampling=greedy(8), **with_images(IMAGE, 2, 1))]
    engine = IMAGES | {"enforce_eager": not compiled}
    (plain,), _ = run_vllm(model, cases, None, environment, **engine)
    (drafted,), log = run_vllm(model, cases, options, environment, **engine)
    assert drafted.tokens == plain.tokens
    assert drafted.explained
    assert "cannot be timed" not in log
    assert f"is primed for {VOCABULARY} of {VOCABULARY} tokens" in log
    monkeypatch.setenv("DRAFTTREE_CACHE", str(cache))
    check_primed(model)


@pytest.mark.full
def test_positions_of_a_chain_are_found(tmp_path: Path) -> None:
    """Negative control: M-RoPE positions stay those of a chain."""
    model = make_tiny_family("qwen2_5_vl", tmp_path)
    cases = [Case(some_prompts(8), greedy(40))]
    environment = qwen_images.ENVIRONMENT
    (plain,), _ = run_vllm(model, cases, None, environment, **NO_IMAGES)
    (wrong,), _ = run_vllm(
        model, cases, TREES, environment, planted_fault="a chain's M-RoPE", **NO_IMAGES
    )
    assert wrong.tokens != plain.tokens


def test_what_is_refused(tmp_path: Path) -> None:
    gemma, qwen = (
        make_tiny_family(family, tmp_path / family) for family in ("gemma3_vision", "qwen2_5_vl")
    )
    expected: list[tuple[Path, dict[str, Any], dict[str, Any], str]] = [
        (gemma, {}, {}, "lets the tokens of an image attend to later ones: serve text alone"),
        (gemma, {}, NO_IMAGES, ""),
        (qwen, {}, {}, ""),
        (qwen, {"method": "rsd", "model": str(qwen)}, {}, "is multimodal"),
        (qwen, {}, {"enable_lora": True}, "with LoRA adapters: leave them out"),
        (qwen, {}, {"video_pruning_rate": 0.5}, "is to prune videos"),
        (qwen, {}, {"kv_offloading_size": 1}, "where chains are drafted in place of trees"),
    ]
    settings = [each[:3] for each in expected]
    environment = ENVIRONMENT | qwen_images.ENVIRONMENT
    messages, _ = run_job("vllm", complaints, (settings,), environment, 200)
    for message, (*_, part) in zip(messages, expected, strict=True):
        assert part in message
        assert bool(message) == bool(part)


def greedy(length: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}


def seeded(count: int, length: int) -> list[dict[str, Any]]:
    return [greedy(length) | {"temperature": 0.5, "seed": seed} for seed in range(count)]


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
