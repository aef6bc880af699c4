"""A plugin of pytest under which vLLM's own tests run with Token Recycling, their files unchanged.

Each `LLM` of a test gets SmolLM2-135M in place of its model, as the tests' models are too large for
a CPU, and Token Recycling in place of its speculative method, with as many draft tokens. The other
settings that are changed are those that no CPU can have. docs/hosts.md lists the tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from drafttree.bench.models import ensure

MODEL = str(ensure("smollm2-135m"))
PLAIN = bool(os.environ.get("HOSTS_PLAIN"))
NODES = "auto"
"""Draft tokens where the test does not name a number."""

BLOCK = 32
"""Tokens of a block where a test limits their number: the least that a CPU can have."""


def with_token_recycling(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    """The speculative config in place of a test's own."""
    if not asked or PLAIN:
        return None
    return {"method": "token_recycling", "nodes": asked.get("num_speculative_tokens", NODES)}


def replace_init(stock: Callable[..., None]) -> Callable[..., None]:
    """`LLM.__init__` with another model and another method."""

    @wraps(stock)
    def init(self: LLM, model: str, **settings: Any) -> None:
        settings["speculative_config"] = with_token_recycling(settings.get("speculative_config"))
        settings.pop("attention_config", None)  # a CPU has one attention backend
        settings["dtype"] = "float32"
        settings["enforce_eager"] = True  # compiling takes a minute for each engine
        settings["disable_log_stats"] = False
        if settings["speculative_config"]:
            settings["async_scheduling"] = False  # as the V1 model runner needs
        if "num_gpu_blocks_override" in settings:
            settings["block_size"] = BLOCK
        stock(self, model=MODEL, **settings)

    return init


TO_THE_LIMIT = frozenset({"test_engine_metrics"})
"""Tests that expect answers of full length, some of which the model ends before."""

ACCEPTED: list[float] = []
"""Accepted draft tokens of the engines of the running test, so far at each call."""


def count_drafts(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`LLM.generate` or `LLM.chat` that notes how many drafts the engine has accepted."""

    @wraps(stock)
    def answer(self: LLM, *arguments: Any, **settings: Any) -> Any:
        outputs = stock(self, *arguments, **settings)
        if self.llm_engine.vllm_config.speculative_config is not None:
            ACCEPTED.extend(
                each.value
                for each in self.get_metrics()
                if each.name == "vllm:spec_decode_num_accepted_tokens"
            )
        return outputs

    return answer


LLM.__init__ = replace_init(LLM.__init__)
LLM.generate = count_drafts(LLM.generate)
LLM.chat = count_drafts(LLM.chat)


@pytest.fixture(autouse=True)
def drafts_are_accepted() -> Iterator[None]:
    """Drafts were accepted in the very test."""
    ACCEPTED.clear()
    yield
    print(f"accepted drafts, after each call of an engine: {ACCEPTED}")
    assert PLAIN or any(ACCEPTED), "no draft was accepted"


@pytest.fixture(autouse=True)
def answers_reach_their_limit(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignore the end of sequence in the tests of `TO_THE_LIMIT`."""
    if request.node.name in TO_THE_LIMIT:
        stock = LLM.generate

        def generate(self: LLM, prompts: Any, sampling_params: SamplingParams) -> Any:
            sampling_params.ignore_eos = True
            return stock(self, prompts, sampling_params)

        monkeypatch.setattr(LLM, "generate", generate)


def pytest_configure() -> None:
    """Let modules be imported that choose attention backends for tests which are not run here."""
    from tests import utils

    utils.get_attn_backend_list_based_on_platform = lambda: []
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # a test calls it between two engines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what is skipped for want of a GPU, and leave out tests of methods with a draft model."""
    items[:] = [each for each in items if "eagle" not in each.name]
    for item in items:
        item.own_markers = [
            mark
            for mark in item.own_markers
            if not (mark.name == "skipif" and mark.kwargs.get("reason", "").startswith("Need at"))
        ]
