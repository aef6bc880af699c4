"""Greedy decoding in float32 gives the same tokens with draft trees as without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hosts import HOSTS, SGLANG, VLLM, VLLM_V2, Answer, Case, Host
from random_prompts import some_prompts

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
VOCAB = 512

FIRST = some_prompts(24)
# A second turn after each prompt, as a chat would send it. In SGLang its beginning is in the cache;
# vLLM's blocks are longer.
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
LONG = {
    "vllm": Case(some_prompts(8, seed=9, shortest=100, longest=121), {**GREEDY, "max_tokens": 200}),
    "sglang": Case(some_prompts(12, seed=8), {**GREEDY, "max_tokens": 160}),
}
CHUNKS = {"vllm": None, "sglang": 32}
"""In SGLang most prompts need several chunks."""


@dataclass(frozen=True)
class Setting:
    """Options of Token Recycling, and arguments of the engines.

    Attributes:
        nodes: Number of draft tokens.
        hot_start: Whether tables are kept between requests.
        running: Greatest number of requests that run at a time.
        processes: Whether vLLM's engine core runs in a process of its own.
        compiled: Whether vLLM compiles the model.
        page: SGLang's page size.
        overlap: Whether SGLang schedules a step while the previous one runs.
    """

    nodes: int
    hot_start: bool
    running: int = 8
    processes: bool = False
    compiled: bool = False
    page: int = 1
    overlap: bool = True

    def __str__(self) -> str:
        """The fields that have no default or another value."""
        return ",".join(
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(Setting, name, None)
        )


CHOSEN = {
    "vllm": [
        Setting(80, True, running=1),
        Setting(80, False, processes=True, compiled=True),
    ],
    "sglang": [
        Setting(80, True),
        Setting(80, True, page=16, overlap=False),
        Setting(32, False, page=16),
    ],
}
FULL = {
    "vllm": [
        Setting(nodes, hot_start, running, processes, compiled)
        for running, nodes, hot_start, processes, compiled in product(
            (1, 8), (8, 32, 80), (True, False), (False, True), (False, True)
        )
    ],
    "sglang": [
        Setting(nodes, nodes != 32, page=page, overlap=overlap)
        for nodes, page, overlap in product((8, 32, 80), (1, 16), (False, True))
    ],
}
FULL_V2 = [
    Setting(8, True, processes=True),
    Setting(15, False),
    Setting(80, True, running=1),
    Setting(80, False, running=1, processes=True),
]


def chat_cases(host: Host, hot_start: bool = True) -> dict[str, Case]:
    if host.name == "vllm":
        return {
            "three times the running requests": Case(FIRST, GREEDY, reset=not hot_start),
            "a second turn": Case(SECOND, GREEDY, reset=not hot_start),
        }
    return {
        "three times the running requests": Case(FIRST, GREEDY, reset=True),
        "a second turn": Case(SECOND, GREEDY),
        "one at a time": Case(FIRST, GREEDY, together=False, reset=True),
        "again after a flush": Case(SECOND, GREEDY, together=False, reset=True),
    }


@cache
def plain_answers(host: Host, model: Path, *, running: int, compiled: bool) -> dict[str, Answer]:
    cases = chat_cases(host)
    if (running, compiled) == (8, False):
        cases["long"] = LONG[host.name]
    served, _ = host.run(
        model,
        list(cases.values()),
        running=running,
        chunk=CHUNKS[host.name],
        vllm={"enforce_eager": not compiled},
    )
    return dict(zip(cases, served, strict=True))


@pytest.mark.parametrize(
    ("host", "setting"),
    [
        *((host, each) for host in HOSTS for each in CHOSEN[host.name]),
        *(
            pytest.param(host, each, marks=pytest.mark.full)
            for host in HOSTS
            for each in FULL[host.name]
            if each not in CHOSEN[host.name]
        ),
        *(pytest.param(VLLM_V2, each, marks=pytest.mark.full) for each in FULL_V2),
    ],
    indirect=["host"],
    ids=str,
)
def test_greedy_tokens_equal_plain_decoding(
    host: Host, tiny_llama: Path, proves_drafting: Callable[[Answer], None], setting: Setting
) -> None:
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if setting.processes else "0"}
    cases = chat_cases(host, setting.hot_start)
    served, log = host.run(
        tiny_llama,
        list(cases.values()),
        "token-recycling",
        {"nodes": setting.nodes, "hot_start": setting.hot_start},
        running=setting.running,
        chunk=CHUNKS[host.name],
        environment=processes if host.name == "vllm" else None,
        vllm={"enforce_eager": not setting.compiled},
        sglang={"page_size": setting.page, "disable_overlap_schedule": not setting.overlap},
    )
    plain = plain_answers(host, tiny_llama, running=setting.running, compiled=setting.compiled)
    for name, drafted in zip(cases, served, strict=True):
        assert drafted.tokens == plain[name].tokens, name
        assert drafted.reasons == plain[name].reasons, name
        proves_drafting(drafted)
        counters = drafted.counters
        assert counters["emitted"] == counters["steps"] + counters["accepted_tokens"]
        if host.runner == "v2" or (host.name == "sglang" and setting.overlap):
            # A request that has ended runs one more step.
            assert counters["emitted"] >= 24 * (GREEDY["max_tokens"] - 1)
        else:
            assert counters["emitted"] == 24 * (GREEDY["max_tokens"] - 1)
    if host.name == "sglang":
        assert sum(cached or 0 for cached in served[1].cached) > 0
    if setting.compiled:  # otherwise nothing runs on a CPU before the first request
        rows = setting.running * (1 + setting.nodes)
        assert f"logits of a step of up to {rows} nodes" in log
        assert f"take up to {rows * VOCAB * 4 / 2**20:.1f} MiB" in log


def test_preemption_does_not_change_tokens(
    host: Host, tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The KV cache has room for only a part of the running requests' tokens."""
    cramped: dict[str, Any] = {
        # Four requests of 3 blocks and their drafts share 7 blocks of 128 slots.
        "vllm": {"running": 4, "length": 512, "vllm": {"num_gpu_blocks_override": 8}},
        "sglang": {
            "options": {"nodes": 8},
            # SGLang then admits requests as if each would generate 16 tokens.
            "environment": {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
            "sglang": {"max_total_tokens": 700, "schedule_conservativeness": 0.01},
        },
    }[host.name]
    (drafted,), log = host.run(tiny_llama, [LONG[host.name]], "token-recycling", **cramped)
    assert drafted.preemptions > 0
    plain = plain_answers(host, tiny_llama, running=8, compiled=False)["long"]
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    if host.name == "sglang":
        assert "KV cache pool is full. Retract requests." in log


@pytest.mark.parametrize(
    ("host", "running"),
    [pytest.param(VLLM, 1, marks=pytest.mark.full), (VLLM, 8), (SGLANG, 8)],
    indirect=["host"],
    ids=str,
)
def test_smollm2_tokens_equal_plain_decoding(
    host: Host, smollm2: Path, proves_drafting: Callable[[Answer], None], running: int
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [
        tokenizer(text)["input_ids"]
        for text in (
            "The capital of France is",
            "def fibonacci(n):\n    ",
            "Question: What is 2 + 2?\nAnswer:",
            "List the numbers from one to ten: one, two, three,",
        )
    ]
    case = Case(prompts, GREEDY, rounds=2)
    (plain,), _ = host.run(smollm2, [case], running=running)
    (drafted,), _ = host.run(smollm2, [case], "token-recycling", running=running)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    assert drafted.counters["emitted"] > 1.3 * drafted.counters["steps"]
