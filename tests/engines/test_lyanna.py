"""Lyanna in both engines: the target's tokens, and correct KV in the drafter's layer."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_host.jobs import NEW_PYTHON, RunFailed
from hosts import Answer, Case, Host
from lyanna_bench import check_demo, check_figures
from lyanna_parts import drafter_for
from lyanna_states import VARIABLE, check_states
from overfitted_drafter import LENGTH, PROMPTS, make_overfitted
from random_prompts import diverging_prompts, some_prompts
from tiny_models import make_tiny_llama

from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
FIRST = some_prompts(24)
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
CASES = {
    "three times the running requests": Case(FIRST, GREEDY, reset=True),
    "a second turn": Case(SECOND, GREEDY),
    "one at a time": Case(FIRST, GREEDY, together=False, reset=True),
    "chunked prefill": Case(some_prompts(8, seed=5, longest=400), GREEDY),
    "repetition penalty": Case(FIRST, {**GREEDY, "repetition_penalty": 1.2}),
    "frequency penalty": Case(FIRST, {**GREEDY, "frequency_penalty": 0.4}),
    "logprobs": Case(FIRST, {**GREEDY, "logprobs": 2}),
    # SGLang uses seeds in its deterministic mode only, which it refuses on a CPU.
    "seeded": Case(FIRST[:8], [{**GREEDY, "temperature": 0.8, "seed": row} for row in range(8)]),
}
CHUNKS = {"vllm": 300, "sglang": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {"nodes": 12, "head": "whole"},
    "not fused": {"nodes": 12, "fusion": False, "table": "float8"},
    "hot tokens alone": {"nodes": 12, "resample": False},
}


@pytest.fixture(scope="module")
def drafter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter, which affects speed alone."""
    folder = tmp_path_factory.mktemp("drafter")
    save(drafter_for(tiny_llama), folder)
    return folder


def served_by(host: Host) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if host.name == "vllm" or name != "seeded"}


@cache
def plain_answers(host: Host, model: Path) -> dict[str, Answer]:
    served, _ = host.run(
        model,
        list(served_by(host).values()),
        chunk=CHUNKS[host.name],
        # With overlapping scheduling plain SGLang's penalties lag by one token.
        sglang={"disable_overlap_schedule": True},
    )
    return dict(zip(served_by(host), served, strict=True))


@cache
def answers(host: Host, model: Path, drafter: Path, setting: str) -> dict[str, Answer]:
    served, _ = host.run(
        model,
        list(served_by(host).values()),
        "lyanna",
        SETTINGS[setting],
        drafter,
        chunk=CHUNKS[host.name],
        sglang={"page_size": 16 if setting == "not fused" else 1},
    )
    return dict(zip(served_by(host), served, strict=True))


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(name, marks=pytest.mark.full if name == "not fused" else ())
        for name in SETTINGS
    ],
)
def test_tokens_equal_plain_decoding(
    host: Host, tiny_llama: Path, drafter: Path, setting: str
) -> None:
    plain = plain_answers(host, tiny_llama)
    drafted = answers(host, tiny_llama, drafter, setting)
    assert {name: each.tokens for name, each in drafted.items()} == {
        name: each.tokens for name, each in plain.items()
    }
    assert [name for name, each in drafted.items() if not each.counters["accepted_tokens"]] == []


DIVERGENCES = {"vllm": [255, 256, 257, 299], "sglang": [31, 32, 33, 250, 299]}
"""Positions at which prompts diverge from the first one."""


@pytest.mark.full
@pytest.mark.parametrize("chunked", [False, True])
def test_the_layers_states_are_those_of_pytorch(
    host: Host, tiny_llama: Path, drafter: Path, tmp_path: Path, chunked: bool
) -> None:
    """Prefill is whole or chunked, and prefix hits end before, at and after a block's end."""
    page = 16 if chunked else 1
    prompts = diverging_prompts(300, DIVERGENCES[host.name])
    prompts.append(prompts[0])
    (answer,), _ = host.run(
        tiny_llama,
        [Case(prompts, GREEDY, together=host.name == "vllm")],
        "lyanna",
        {"nodes": 12, "head": "whole"},
        draft_model=drafter,
        running=1,
        chunk={"vllm": 100, "sglang": 96}[host.name] if chunked else 1024,
        environment={VARIABLE: str(tmp_path / "states")},
        sglang={"page_size": page},
    )
    if host.name == "vllm":
        # The last block of a hit is computed again, because the token after it may differ.
        assert answer.cached == [0, 0, 128, 128, 128, 128]
    else:
        # A hit ends where the token after it still is the same.
        assert answer.cached == [hit // page * page for hit in (0, 30, 31, 32, 249, 298, 298)]
    check_states(tiny_llama, drafter, prompts, answer.tokens, tmp_path / "states")


def test_a_drafter_that_has_memorised_the_answers_is_accepted(
    host: Host, tiny_llama: Path, tmp_path: Path
) -> None:
    """That proves the layer's KV correct, for single requests, batches and prefix hits, and the
    copy of the head: all tokens are hot."""
    learned = make_overfitted(tiny_llama, tmp_path / "drafter")
    settings = {**GREEDY, "max_tokens": LENGTH}
    served, _ = host.run(
        tiny_llama,
        [
            Case(PROMPTS, settings),
            Case(PROMPTS, settings),
            Case(PROMPTS, settings, together=False),
        ],
        "lyanna",
        {"nodes": 12, "resample": False},
        tmp_path / "drafter",
    )
    assert learned.mean_accepted_tokens > 3.8
    # SGLang runs one more step for a request that has ended.
    least = 3.5 if host.name == "vllm" else 3.3
    for answer in served:
        assert answer.counters["emitted"] / answer.counters["steps"] > least


@pytest.mark.full
def test_preemption_does_not_change_tokens(host: Host, tiny_llama: Path, drafter: Path) -> None:
    count = {"vllm": 6, "sglang": 8}[host.name]
    case = Case(some_prompts(count, longest=30), {**GREEDY, "max_tokens": 300})
    (plain,), _ = host.run(tiny_llama, [case])
    (drafted,), _ = host.run(
        tiny_llama,
        [case],
        "lyanna",
        {"nodes": 12},
        draft_model=drafter,
        running=4 if host.name == "vllm" else 8,
        vllm={"num_gpu_blocks_override": 11},
        sglang={"max_total_tokens": 900, "schedule_conservativeness": 0.01},
        # SGLang then admits requests as if each would generate 16 tokens.
        environment={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
        if host.name == "sglang"
        else None,
    )
    assert drafted.preemptions > 0
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0


@pytest.mark.full
def test_a_target_is_found_by_its_name_on_the_hub(
    host: Host, tiny_llama: Path, drafter: Path, tmp_path: Path
) -> None:
    """The drafter's target is then among the files that the Hub's local cache has."""
    repository, commit = tmp_path / "models--org--name", "1" * 40
    for folder in ("refs", "snapshots"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).symlink_to(tiny_llama, target_is_directory=True)
    case = Case(FIRST[:4], GREEDY)
    (plain,), _ = host.run(tiny_llama, [case])
    (drafted,), _ = host.run(
        Path("org/name"),
        [case],
        "lyanna",
        {"nodes": 12},
        draft_model=drafter,
        # The cache's place is read when the Hub's library is imported.
        environment={"HF_HUB_CACHE": str(tmp_path), NEW_PYTHON: os.environ.get("PYTHONPATH", "")},
    )
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0


@pytest.mark.full
def test_bench_gives_its_figures(host: Host, smollm2: Path, tmp_path: Path) -> None:
    check_figures(host.name, smollm2, tmp_path)


@pytest.mark.full
def test_the_demo_with_the_shipped_drafter(host: Host) -> None:
    check_demo(host.name)


def test_another_targets_drafter_is_refused(
    host: Host, tiny_llama: Path, drafter: Path, tmp_path: Path
) -> None:
    other = make_tiny_llama(tmp_path, seed=5)
    with pytest.raises(RunFailed, match="whose weights are not those of the target"):
        host.run(other, [], "lyanna", draft_model=drafter)
