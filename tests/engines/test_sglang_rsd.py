"""RSD through the real SGLang: greedy tokens are the target's, and drafts are accepted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_first_layers
from typer.testing import CliRunner

from drafttree.cli import app

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}


OFF = {"drafttree": False}


def some_prompts(count: int, seed: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, 512) for _ in range(draw.randrange(4, 60))] for _ in range(count)]


FIRST = some_prompts(24)
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
CASES = {
    "three times the running requests": Case(FIRST, GREEDY, reset=True),
    "prefix hits": Case(SECOND, GREEDY),
    "one at a time": Case(FIRST[:8], GREEDY, together=False, reset=True),
    "frequency penalty": Case(FIRST, {**GREEDY, "frequency_penalty": 0.4}),
    "logprobs": Case(FIRST[:8], GREEDY, logprobs=2),
    "drafting turned off": Case(
        FIRST[:8],
        [GREEDY if row % 2 else {**GREEDY, "custom_params": OFF} for row in range(8)],
    ),
    "long": Case(FIRST[:4], {**GREEDY, "max_new_tokens": 500}),
}
LIMITS = {"chunked_prefill_size": 32, "disable_overlap_schedule": True}


@pytest.fixture(scope="module")
def draft(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's first layer."""
    return make_first_layers(tiny_llama, tmp_path_factory.mktemp("draft"), 1)


@cache
def plain_answers(model: Path) -> dict[str, Answer]:
    served, _ = run_sglang(model, list(CASES.values()), drafted=False, **LIMITS)
    return dict(zip(CASES, served, strict=True))


@cache
def answers(model: Path, draft: Path, tree: str, page: int) -> dict[str, Answer]:
    served, _ = run_sglang(
        model,
        list(CASES.values()),
        options={"tree": tree},
        draft_model=draft,
        page_size=page,
        chunked_prefill_size=32,
    )
    return dict(zip(CASES, served, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tree", "page"), [("beam:3x4", 1), ("branch:3-2-1", 16)])
def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path,
    draft: Path,
    proves_drafting: Callable[[Answer], None],
    tree: str,
    page: int,
    case: str,
) -> None:
    plain = plain_answers(tiny_llama)[case]
    drafted = answers(tiny_llama, draft, tree, page)[case]
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    for mine, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_accepted(
    tiny_llama: Path, temperature: float
) -> None:
    """Over 500 tokens, prompts read in pieces and prefix hits: so the draft model's KV is right."""
    settings = {**GREEDY, "temperature": temperature, "max_new_tokens": 501}
    cases = [
        Case(FIRST[:4], settings),
        Case(SECOND[:4], {**settings, "max_new_tokens": 41}),
        Case(SECOND[:4], {**settings, "max_new_tokens": 41}, together=False),
    ]
    served, _ = run_sglang(
        tiny_llama,
        cases,
        options={"tree": "branch:1-1-1-1"},
        draft_model=tiny_llama,
        chunked_prefill_size=32,
    )
    for answer in served:
        counters = answer.counters
        assert counters["accepted_tokens"] == 4 * counters["steps"]
    assert sum(served[1].cached) > 0


def test_bench_gives_the_figures_of_the_field(smollm2: Path, tmp_path: Path) -> None:
    draft = make_first_layers(smollm2, tmp_path, 10)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text('{"question_id": 1, "category": "qa", "turns": ["Count to ten."]}\n')
    arguments = [
        *("bench", "--engine", "sglang", "--method", "rsd", "--model", str(smollm2)),
        *("--option", f"model={draft}", "--option", "tree=beam:2x2", "--prompts", str(prompts)),
        *("--max-new-tokens", "12", "--eager", "--output", str(output)),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert report["identical"] + report["ties"] == 1
    assert report["counters"]["draft_tokens"] > 0
    assert report["block_efficiency"] == report["mean_accepted_tokens"]
    ratio = report["draft_size_ratio"]
    assert 0.4 < ratio < 0.7
    assert report["mbsu"] == pytest.approx(report["block_efficiency"] / (2 * ratio + 1))
    assert 0 < report["draft_time_share"] < 1
