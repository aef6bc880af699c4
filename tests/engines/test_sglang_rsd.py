"""RSD through the real SGLang: greedy tokens are the target's, and drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from rsd_bench import check_figures
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_first_layers

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}


OFF = {"drafttree": False}


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
        method="rsd",
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


ADJUSTED: dict[str, Any] = {
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {"7": 2.0},
}


def always_accepted(model: Path, cases: list[Case], **engine: Any) -> list[Answer]:
    """Serve with the target as its own draft model: if its KV is that of a fresh prefill, all is
    accepted, and no request takes more steps than five tokens each make."""
    served, _ = run_sglang(
        model,
        cases,
        options={"tree": "branch:1-1-1-1"},
        method="rsd",
        draft_model=model,
        chunked_prefill_size=32,
        **engine,
    )
    for case, answer in zip(cases, served, strict=True):
        assert isinstance(case.sampling, dict)
        steps = ceil((case.sampling["max_new_tokens"] - 1) / 5)
        assert 0 < answer.counters["steps"] <= steps * len(case.prompts)
    return served


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_accepted(
    tiny_llama: Path, temperature: float
) -> None:
    """Over 500 tokens, ends inside a tree, prompts read in pieces, prefix hits, prompts that
    part right after a page, and penalties and biases along the drafts."""
    settings = {**GREEDY, "temperature": temperature, "max_new_tokens": 503}
    short = {**settings, "max_new_tokens": 41}
    parting = [[*range(2, 50), row, 5, 6] for row in range(60, 66)]
    served = always_accepted(
        tiny_llama,
        [
            Case(FIRST[:4], settings),
            Case(FIRST[:4], {**short, **ADJUSTED}),
            Case(SECOND[:4], short),
            Case(SECOND[:4], short, together=False),
            Case(parting[:1], short),
            Case(parting[1:], short),
        ],
        page_size=16,
    )
    assert sum(served[3].cached) > 0
    assert served[5].cached == [48] * 5


def test_retracted_requests_go_on_as_if_they_had_not_been(tiny_llama: Path) -> None:
    """The draft model's KV is made anew with the target's."""
    case = Case(some_prompts(8, longest=30), {**GREEDY, "max_new_tokens": 300})
    (plain,), _ = run_sglang(tiny_llama, [case], drafted=False)
    (own,) = always_accepted(
        tiny_llama,
        [case],
        max_total_tokens=900,
        schedule_conservativeness=0.01,
        # The host then admits requests as if they were to write 16 tokens each.
        variables={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
    )
    assert sum(own.retractions) > 0
    assert own.tokens == plain.tokens


def test_bench_gives_the_figures_of_the_field(smollm2: Path, tmp_path: Path) -> None:
    check_figures("sglang", smollm2, tmp_path)
