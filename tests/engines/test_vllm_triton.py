"""The attention backend for CUDA in the real vLLM, on a CPU with Triton's interpreter."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_stand_in
import pytest
import triton_on_cpu
from lyanna_parts import drafter_for
from tiny_families import make_tiny_family
from tiny_models import make_first_layers
from vllm_runs import Answer, Case, run_vllm

from lyanna_plugin.checkpoint import save

NODES = 15
LIMITS = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 128}
"""The first step reads 48 tokens of the longest prompt and the second 16, which is the size of a
tree: they must stay causal."""


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(2, 512) for _ in range(length)] for length in (64, 9, 1, 3)]


# Copies of the first answers would take the place of branches.
RECYCLING = {"method": "token_recycling", "nodes": NODES, "memory": 0}


def serve_both_ways(
    model: Path,
    proves_drafting: Callable[[Answer], None],
    speculative: dict[str, Any] = RECYCLING,
    flash: int | None = None,
) -> None:
    """Compare the answers; `flash` is the version of flash attention that the drafted run uses."""
    on_cpu = triton_on_cpu.ENVIRONMENT if flash is None else flash_stand_in.environment(flash)
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    cases = [Case(prompts(), greedy), Case(prompts(), greedy)]
    plain, _ = run_vllm(model, cases, **LIMITS)
    drafted, log = run_vllm(
        model,
        cases,
        speculative=speculative,
        environment=on_cpu,
        **LIMITS,
    )
    assert triton_on_cpu.SERVED in log
    assert (flash_stand_in.SERVED in log) == (flash is not None)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
    proves_drafting(drafted[-1])


def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    serve_both_ways(tiny_llama, proves_drafting)


def test_flash_attention_reads_what_comes_before_a_step(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    serve_both_ways(tiny_llama, proves_drafting, flash=3)


def test_masks_hold_the_trees_of_priming(tiny_llama: Path, tmp_path: Path) -> None:
    """They are wide enough for trees of 15 nodes; forwards that prime have up to 65 elsewhere."""
    _, log = run_vllm(
        tiny_llama,
        [Case(prompts()[1:2], {"temperature": 0.0, "max_tokens": 2})],
        speculative=RECYCLING | {"prime": True, "prime_seconds": math.inf},
        environment=triton_on_cpu.ENVIRONMENT | {"DRAFTTREE_CACHE": str(tmp_path)},
        **LIMITS,
    )
    assert triton_on_cpu.SERVED in log
    vocabulary = json.loads((tiny_llama / "config.json").read_text())["vocab_size"]
    assert f"is primed for {vocabulary} of {vocabulary} tokens" in log


@pytest.mark.full
def test_rsd(tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]) -> None:
    """The draft model reads all rows of a step with each level, and attention new masks."""
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x3"}
    serve_both_ways(tiny_llama, proves_drafting, method)


@pytest.mark.full
def test_lyanna(tiny_llama: Path, tmp_path: Path) -> None:
    """The layer's chains and the trees have masks of their own within a step."""

    def proves_drafting(answer: Answer) -> None:
        assert answer.counters["accepted_tokens"] > 0

    # A random drafter, which affects speed alone.
    save(drafter_for(tiny_llama), tmp_path)
    method = {"method": "lyanna", "model": str(tmp_path), "nodes": 9, "resample_nodes": 5}
    serve_both_ways(tiny_llama, proves_drafting, method)


@pytest.mark.full
@pytest.mark.parametrize("flash", [None, 2])
@pytest.mark.parametrize("family", ["heads_of_80", "gemma2", "gpt_oss"])
def test_windows_soft_caps_sinks_and_head_sizes(
    family: str, flash: int | None, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Flash attention serves the layers without a window."""
    serve_both_ways(make_tiny_family(family, tmp_path), proves_drafting, flash=flash)
