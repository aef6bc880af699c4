"""Greedy decoding in float32 on CUDA gives the same tokens with draft trees as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_rows
import draw_ahead_on_cpu
import forbid_device_sync
import pytest
import torch
from lyanna_parts import drafter_for, predict_embeddings
from tiny_models import make_first_layers
from vllm_runs import Answer, Case, run_vllm

from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.protocol import EngineSpec, ForwardShape
from lyanna_plugin.checkpoint import save

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The engine's own Triton kernels would multiply float32 in TF32.
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
RUNNERS = {
    "V1": {"VLLM_USE_V2_MODEL_RUNNER": "0", **EXACT},
    "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1", **EXACT},
}
GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
# Little memory, so that several tests can run side by side.
ENGINE = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
    "attention_backend": "TRITON_ATTN",
}


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of 4 to 199 tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 200))] for _ in range(count)]


def drafted_as_plain(
    model: Path, cases: list[Case], method: dict[str, Any], eager: bool, runner: str
) -> list[Answer]:
    """The answers with a method, whose tokens must be those without it."""
    settings = {"enforce_eager": eager, "environment": RUNNERS[runner], **ENGINE}
    plain, _ = run_vllm(model, cases, **settings)
    drafted, _ = run_vllm(model, cases, speculative=method, **settings)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
    return drafted


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("tree", ["dynamic", "static"])
def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None], tree: str, eager: bool, runner: str
) -> None:
    draw = random.Random(3)
    # Some prompts are as long as a tree with its root, and so run in a tree's captured graph.
    lengths = [draw.randrange(4, 200) for _ in range(20)] + [81] * 4
    prompts = [[draw.randrange(2, 512) for _ in range(length)] for length in lengths]
    cases = [Case(prompts, GREEDY), *(Case([each], GREEDY) for each in prompts[-4:])]
    method = {"method": "token_recycling", "nodes": 80, "tree": tree}
    drafted = drafted_as_plain(tiny_llama, cases, method, eager, runner)
    proves_drafting(drafted[0])


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_lyannas_layer_drafts_in_graphs_what_it_drafts_without(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None], runner: str
) -> None:
    drafter = drafter_for(tiny_llama)
    predict_embeddings(drafter)
    save(drafter, tmp_path / "drafter")
    prompts = random_prompts(5, 12)
    # Logprobs of prompts are read from the target's states after the layer has run.
    scored = {**GREEDY, "prompt_logprobs": 2}
    cases = [Case(prompts, GREEDY), Case(prompts[:1], GREEDY), Case(prompts, scored)]
    settings = {"environment": RUNNERS[runner] | draft_rows.ENVIRONMENT, **ENGINE}
    method = {"method": "lyanna", "model": str(tmp_path / "drafter"), "nodes": 12}
    plain, _ = run_vllm(tiny_llama, cases, environment=RUNNERS[runner], **ENGINE)
    eager, log = run_vllm(tiny_llama, cases, speculative=method, enforce_eager=True, **settings)
    assert any(forwards for *_, forwards in draft_rows.counted(log))
    replayed, log = run_vllm(tiny_llama, cases, speculative=method, enforce_eager=False, **settings)
    # What runs in a graph is not called again, so the layer's steps are not counted. The first
    # steps may be the engine's own, before it captures.
    assert not any(forwards for *_, forwards in draft_rows.counted(log)[-20:])
    for one, other, expected in zip(replayed, eager, plain, strict=True):
        assert one.tokens == other.tokens == expected.tokens
    # Steps of several requests depend on when each arrives.
    assert replayed[1].counters == eager[1].counters
    for mine, theirs in zip(replayed[2].prompt_logprobs, plain[2].prompt_logprobs, strict=True):
        for of_mine, of_theirs in zip(mine[1:], theirs[1:], strict=True):
            assert of_mine == pytest.approx(of_theirs, abs=1e-4)
    proves_drafting(replayed[0])


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("eager", [False, True])
def test_greedy_tokens_with_a_draft_model_equal_plain_decoding(
    tiny_llama: Path,
    tmp_path: Path,
    proves_drafting: Callable[[Answer], None],
    eager: bool,
    runner: str,
) -> None:
    prompts = random_prompts(6, 12)
    cases = [Case(prompts, GREEDY), Case(prompts[:1], GREEDY)]
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x3"}
    drafted = drafted_as_plain(tiny_llama, cases, method, eager, runner)
    proves_drafting(drafted[0])


def test_a_step_of_v1_does_not_synchronise_with_the_device(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    prompts = random_prompts(4, 8)
    free = {**GREEDY, "temperature": 0.8}
    filtered = {**free, "top_p": 0.9}
    answers, log = run_vllm(
        tiny_llama,
        [Case(prompts, settings) for settings in (GREEDY, free, filtered)],
        speculative={"method": "token_recycling"},
        environment=forbid_device_sync.ENVIRONMENT | draw_ahead_on_cpu.ENVIRONMENT | RUNNERS["V1"],
        **ENGINE,
    )
    for answer in answers:
        proves_drafting(answer)
    assert log.count(draw_ahead_on_cpu.DRAWN) >= answers[1].counters["steps"] / len(prompts)


def test_a_step_of_v2_does_not_synchronise_with_the_device(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """vLLM's own check covers whole steps, and what it allows itself is no wait."""
    prompts = random_prompts(4, 8)
    free = {**GREEDY, "temperature": 0.8}
    answers, _ = run_vllm(
        tiny_llama,
        [Case(prompts, settings) for settings in (GREEDY, free, {**free, "top_p": 0.9})],
        speculative={"method": "token_recycling"},
        enforce_eager=False,
        environment=RUNNERS["V2"] | {"VLLM_GPU_SYNC_CHECK": "error"},
        **ENGINE,
    )
    for answer in answers:
        proves_drafting(answer)


def test_forwards_over_trees_and_chains_are_timed(smollm2: Path) -> None:
    config = {"method": "token_recycling", "prime": False}
    spec = EngineSpec(
        str(smollm2), max_model_len=256, eager=True, speculative_config=config, runner="v1"
    )
    with EngineProcess("vllm", "times", spec) as engine:
        engine.wait_until_ready()
        for tree in (False, True):
            assert min(engine.forward_seconds(ForwardShape(2, 16, 64, tree, 3))) > 0
