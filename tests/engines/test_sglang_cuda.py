"""Greedy decoding on CUDA gives the same tokens with draft trees as without."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for
from sglang_on_gpu import (
    BACKENDS,
    FLOAT32,
    LOGPROBS,
    assert_same_answers,
    engine_settings,
    make_model,
)
from sglang_runs import Answer, Case, run_sglang

from drafttree.sglang.versions import is_tested
from lyanna_plugin.checkpoint import save

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each attention backend that this machine has."""
    name = str(request.param)
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed here")
    if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return name


def random_prompts(count: int) -> list[list[int]]:
    """Prompts of 4 to 59 tokens."""
    draw = random.Random(3)
    return [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 60))] for _ in range(count)]


def drafted_as_plain(
    model: Path, prompts: list[list[int]], alone: int, settings: dict[str, Any], **method: Any
) -> tuple[list[Answer], str]:
    """The answers with a method, which must be those without it, and the engine's log.

    Args:
        model: The target.
        prompts: Prompts that are asked together.
        alone: Number of the first prompts that are also asked one after another.
        settings: Keyword arguments of `run_sglang` for both engines.
        method: Keyword arguments of `run_sglang` for the engine with the method.
    """

    def cases(logprobs: int | None) -> list[Case]:
        return [
            Case(prompts, GREEDY, logprobs=logprobs),
            Case(prompts[:alone], GREEDY, together=False, logprobs=logprobs),
        ]

    rounded = settings["dtype"] != FLOAT32["dtype"]
    plain, _ = run_sglang(model, cases(LOGPROBS if rounded else None), drafted=False, **settings)
    drafted, log = run_sglang(model, cases(None), **settings, **method)
    for found, expected in zip(drafted, plain, strict=True):
        assert_same_answers(found, expected, settings["attention_backend"])
    return drafted, log


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlap"])
def test_greedy_tokens_equal_plain_decoding(
    model: Path,
    proves_drafting: Callable[[Answer], None],
    backend: str,
    graphs: bool,
    overlap: bool,
) -> None:
    settings = engine_settings(
        backend, disable_cuda_graph=not graphs, disable_overlap_schedule=not overlap
    )
    answers, _ = drafted_as_plain(model, random_prompts(24), 24, settings)
    for answer in answers:
        proves_drafting(answer)


def test_graphs_of_several_sizes(model: Path, backend: str) -> None:
    """A server captures them if no number of draft tokens is asked for."""
    settings = engine_settings(backend)
    options = {"nodes": "auto", "max_nodes": 15}
    answers, log = drafted_as_plain(model, random_prompts(24), 24, settings, options=options)
    assert "CUDA graphs verify trees of 0 " in log
    # Whether drafting pays is measured.
    assert answers[0].counters["steps"] > 0


@pytest.mark.parametrize("method", ["rsd", "lyanna"])
def test_greedy_tokens_of_methods_with_a_model_equal_plain_decoding(
    model: Path, tmp_path: Path, method: str, backend: str
) -> None:
    if not is_tested(pytest.importorskip("sglang").__version__):
        pytest.skip("this version serves methods without a model alone")
    draft_model, options = model, {}
    if method == "lyanna":
        draft_model, options = tmp_path / "drafter", {"nodes": 12}
        save(drafter_for(model), draft_model)
    answers, _ = drafted_as_plain(
        model,
        random_prompts(12),
        2,
        engine_settings(backend),
        options=options,
        method=method,
        draft_model=draft_model,
    )
    for answer in answers:
        assert answer.counters["accepted_tokens"] > 0
