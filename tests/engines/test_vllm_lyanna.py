"""Lyanna through the real vLLM: the target's tokens, and a layer whose KV is that of the text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from by_heart import LENGTH, PROMPTS, make_by_heart
from joint_distribution import exact_joint, p_value
from lyanna_bench import check_demo, check_figures
from lyanna_parts import drafter_for
from lyanna_states import VARIABLE, check_states
from random_prompts import parting_prompts, some_prompts
from tiny_models import make_tiny_llama
from vllm_runs import Answer, Case, RunFailed, run_vllm

from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
FIRST = some_prompts(24)
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
CASES = {
    "many": Case(FIRST, GREEDY),
    "a second turn": Case(SECOND, GREEDY),
    "read in pieces": Case(some_prompts(8, seed=5, longest=400), GREEDY),
    "repetition penalty": Case(FIRST, {**GREEDY, "repetition_penalty": 1.2}),
    "logprobs": Case(FIRST, {**GREEDY, "logprobs": 2}),
    "seeded": Case(FIRST[:8], [{**GREEDY, "temperature": 0.8, "seed": row} for row in range(8)]),
}
LIMITS = {"max_num_batched_tokens": 300}
SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "alone": {"fusion": False, "table": "float8"},
    "without a second tree": {"resample": False},
}


@pytest.fixture(scope="module")
def drafter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one: it changes nothing but speed."""
    folder = tmp_path_factory.mktemp("drafter")
    save(drafter_for(tiny_llama), folder)
    return folder


@cache
def plain_answers(model: Path) -> dict[str, Answer]:
    served, _ = run_vllm(model, list(CASES.values()), **LIMITS)
    return dict(zip(CASES, served, strict=True))


@cache
def answers(model: Path, drafter: Path, setting: str) -> dict[str, Answer]:
    served, _ = run_vllm(
        model,
        list(CASES.values()),
        speculative={"method": "lyanna", "model": str(drafter), **SETTINGS[setting]},
        **LIMITS,
    )
    return dict(zip(CASES, served, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_equal_plain_decoding(
    tiny_llama: Path, drafter: Path, setting: str, case: str
) -> None:
    plain = plain_answers(tiny_llama)[case]
    drafted = answers(tiny_llama, drafter, setting)[case]
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0


@pytest.mark.parametrize("chunk", [1024, 100])
def test_the_layers_states_are_those_of_pytorch(
    tiny_llama: Path, drafter: Path, tmp_path: Path, chunk: int
) -> None:
    """Prompts read whole and in pieces, and hits that end before, at and after a block's end."""
    prompts = parting_prompts(300, [255, 256, 257, 299])
    prompts.append(prompts[0])
    (answer,), _ = run_vllm(
        tiny_llama,
        [Case(prompts, GREEDY)],
        speculative={"method": "lyanna", "model": str(drafter)},
        environment={VARIABLE: str(tmp_path / "states")},
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
    )
    # The last block of a hit is read again: the token after it may be another.
    assert answer.cached == [0, 0, 128, 128, 128, 128]
    answers = [samples[0] for samples in answer.tokens]
    check_states(tiny_llama, drafter, prompts, answers, tmp_path / "states")


def test_what_was_learnt_by_heart_is_accepted(tiny_llama: Path, tmp_path: Path) -> None:
    """So the layer's KV is that of the text: alone, all together, and after prefix hits."""
    learnt = make_by_heart(tiny_llama, tmp_path / "drafter")
    settings = {**GREEDY, "max_tokens": LENGTH}
    served, _ = run_vllm(
        tiny_llama,
        [Case(PROMPTS, settings), Case(PROMPTS, settings)],
        speculative={"method": "lyanna", "model": str(tmp_path / "drafter"), "resample": False},
    )
    assert learnt.mean_accepted_tokens > 3.8
    for answer in served:
        counters = answer.counters
        assert counters["emitted"] / counters["steps"] > 3.5


def test_the_joint_distribution_is_the_targets_own(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target = make_tiny_llama(tmp_path / "target", vocab_size=10, sharpness=3.0)
    save(drafter_for(target, hot_tokens=10), tmp_path / "drafter")
    sampling = {"temperature": 1.3, "top_k": 8, "max_tokens": 4, "ignore_eos": True}
    (answer,), _ = run_vllm(
        target,
        [Case([[3, 7, 4]] * 8_000, sampling)],
        speculative={"method": "lyanna", "model": str(tmp_path / "drafter"), "nodes": 6},
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=128,
    )
    assert answer.counters["accepted_tokens"] > 0.1 * answer.counters["steps"]
    joint = exact_joint(target, [3, 7, 4], 10, 1.3, 8)
    assert p_value([samples[0] for samples in answer.tokens], joint) > 0.001


def test_preempted_requests_go_on_as_if_they_had_not_been(tiny_llama: Path, drafter: Path) -> None:
    case = Case(some_prompts(6, longest=30), {**GREEDY, "max_tokens": 300})
    (plain,), _ = run_vllm(tiny_llama, [case])
    (drafted,), _ = run_vllm(
        tiny_llama,
        [case],
        speculative={"method": "lyanna", "model": str(drafter)},
        num_gpu_blocks_override=11,
        max_num_seqs=4,
    )
    assert drafted.preemptions > 0
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0


def test_bench_gives_its_figures(smollm2: Path, tmp_path: Path) -> None:
    check_figures("vllm", smollm2, tmp_path)


def test_the_demo_with_the_drafter_that_comes_along() -> None:
    check_demo("vllm")


def test_another_targets_drafter_is_refused(drafter: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path, seed=5)
    with pytest.raises(RunFailed, match="whose weights are not those of the target"):
        run_vllm(other, [], speculative={"method": "lyanna", "model": str(drafter)})
