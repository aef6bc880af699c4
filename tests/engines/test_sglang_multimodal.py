"""Multimodal models: tokens in SGLang with draft trees equal those without."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qwen_images
import shown_tokens
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_families import IMAGE, VOCABULARY
from tiny_images import make_tiny_gemma, make_tiny_qwen
from top_tokens import check_primed

# Copies of the first answers would take the place of branches.
TREES = {"memory": 0}

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}

CHUNKS = {"chunked_prefill_size": 32}
"""Prompts are read in parts, many of which end within an image."""

MODELS: dict[str, tuple[Callable[[Path], Path], list[int], dict[str, Any]]] = {
    "qwen2_5_vl": (
        make_tiny_qwen,
        [IMAGE - 2, IMAGE, IMAGE - 3],
        {"variables": shown_tokens.ENVIRONMENT | {qwen_images.VARIABLE: "1"}},
    ),
    "gemma3": (
        make_tiny_gemma,
        [IMAGE - 1],
        {"variables": shown_tokens.ENVIRONMENT, "enable_multimodal": True},
    ),
}
"""Models that see, what stands for an image in a prompt, and the engine's settings."""


def with_images(placeholder: list[int], seed: int, count: int = 8) -> dict[str, Any]:
    """Prompts and images of a case: of three requests one has no image, one has one, one two."""
    # Printable characters, as SGLang decodes and encodes the text around images.
    prompts = [
        [2 + token % 94 for token in prompt] for prompt in some_prompts(count, seed, longest=60)
    ]
    images = [[100 * seed + 2 * row + each for each in range(row % 3)] for row in range(count)]
    for row, (prompt, seeds) in enumerate(zip(prompts, images, strict=True)):
        for each in range(len(seeds)):
            place = (row + 7 * each) % len(prompt)
            while prompt[place] >= IMAGE - 3:  # not within another image
                place -= 1
            prompt[place:place] = placeholder
    return {"prompts": prompts, "images": images}


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("qwen2_5_vl", CHUNKS),
        pytest.param("qwen2_5_vl", {}, marks=pytest.mark.full),
        pytest.param("gemma3", CHUNKS, marks=pytest.mark.full),
        pytest.param("gemma3", {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_images(
    family: str,
    engine: dict[str, Any],
    tmp_path: Path,
    proves_drafting: Callable[[Answer], None],
) -> None:
    make, placeholder, settings = MODELS[family]
    model, settings = make(tmp_path), settings | engine
    first = with_images(placeholder, 1)
    others = {"images": [[seed + 50 for seed in seeds] for seeds in first["images"]]}
    cases = [
        Case(sampling=GREEDY, **first),
        Case(sampling=GREEDY, **first | others),
        # The images are in the cache of prefixes.
        Case(sampling=GREEDY, **first),
        Case(sampling=GREEDY, together=False, **with_images(placeholder, 2, 3)),
        Case(sampling=GREEDY, logprobs=4, **with_images(placeholder, 3)),
    ]
    plain, _ = run_sglang(model, cases, drafted=False, **settings)
    drafted, _ = run_sglang(model, cases, TREES, **settings)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    for row, prompt in enumerate(first["prompts"]):
        assert drafted[2].cached[row] >= len(prompt) - 1
    # The model sees its images.
    assert plain[0].tokens != plain[1].tokens
    check_logprobs(plain[-1], drafted[-1])


def check_logprobs(plain: Answer, drafted: Answer) -> None:
    """Tokens are sampled from equal distributions."""
    for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert other == pytest.approx(one, abs=1e-3)
    for one, other in zip(plain.top_logprobs, drafted.top_logprobs, strict=True):
        for best, drafted_best in zip(one, other, strict=True):
            assert sorted(drafted_best.values()) == pytest.approx(sorted(best.values()), abs=1e-3)


@pytest.mark.full
def test_sampling_follows_plain_decoding(
    tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The first tokens after an image are as often each pair of tokens as without drafts."""
    from scipy.stats import chi2_contingency

    make, placeholder, settings = MODELS["qwen2_5_vl"]
    prompt, count = [40, 41, *placeholder, 42], 1000
    sampling = GREEDY | {"temperature": 1.0, "top_k": 2, "max_new_tokens": 5}
    cases = [Case([prompt] * count, sampling, images=[[7]] * count)]
    model = make(tmp_path)
    (plain,), _ = run_sglang(model, cases, drafted=False, **settings)
    (drafted,), _ = run_sglang(model, cases, {"tree": "branch:2-2-1"}, **settings)
    proves_drafting(drafted)
    kinds = sorted({tuple(tokens[:4]) for tokens in plain.tokens + drafted.tokens})
    counts = [
        [sum(tuple(tokens[:4]) == kind for tokens in answer.tokens) for kind in kinds]
        for answer in (plain, drafted)
    ]
    assert len(kinds) > 4
    assert chi2_contingency(counts).pvalue > 0.001


@pytest.mark.full
def test_forwards_outside_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Priming and the measurements at start give the model M-RoPE positions."""
    make, placeholder, settings = MODELS["qwen2_5_vl"]
    model, cache = make(tmp_path / "model"), tmp_path / "cache"
    settings = settings | {"variables": settings["variables"] | {"DRAFTTREE_CACHE": str(cache)}}
    options = {"memory": 0, "nodes": "auto", "prime": True, "prime_seconds": math.inf}
    cases = [Case(sampling=GREEDY, **with_images(placeholder, 1, 3))]
    (plain,), _ = run_sglang(model, cases, drafted=False, **settings)
    (drafted,), log = run_sglang(model, cases, options, **settings)
    assert drafted.tokens == plain.tokens
    assert "cannot be timed" not in log
    assert f"is primed for {VOCABULARY} of {VOCABULARY} tokens" in log
    monkeypatch.setenv("DRAFTTREE_CACHE", str(cache))
    check_primed(model)


@pytest.mark.full
def test_retracted_requests(tmp_path: Path, proves_drafting: Callable[[Answer], None]) -> None:
    """The KV cache has room for only a part of the running requests' tokens."""
    make, placeholder, settings = MODELS["qwen2_5_vl"]
    model = make(tmp_path)
    cases = [Case(sampling=GREEDY | {"max_new_tokens": 120}, **with_images(placeholder, 1))]
    (plain,), _ = run_sglang(model, cases, drafted=False, **settings)
    # SGLang then admits requests as if each would generate 16 tokens.
    estimate = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
    cramped = settings | {
        "variables": settings["variables"] | estimate,
        "max_total_tokens": 700,
        "schedule_conservativeness": 0.01,
    }
    (drafted,), _ = run_sglang(model, cases, {"tree": "branch:2-1-1-1-1-1"}, **cramped)
    assert drafted.tokens == plain.tokens
    assert sum(drafted.retractions) > 0
    proves_drafting(drafted)


@pytest.mark.full
def test_positions_of_a_chain_are_found(tmp_path: Path) -> None:
    """Negative control: M-RoPE positions stay those of a chain."""
    make, placeholder, settings = MODELS["qwen2_5_vl"]
    model, cases = make(tmp_path), [Case(sampling=GREEDY, **with_images(placeholder, 1))]
    (plain,), _ = run_sglang(model, cases, drafted=False, **settings)
    (wrong,), _ = run_sglang(model, cases, TREES, planted_fault="a chain's M-RoPE", **settings)
    assert wrong.tokens != plain.tokens
