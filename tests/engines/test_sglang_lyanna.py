"""Lyanna through the real SGLang: the target's tokens, and a layer whose KV is that of the text."""

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
from sglang_runs import Answer, Case, RunFailed, run_sglang
from tiny_models import make_tiny_llama

from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
FIRST = some_prompts(24)
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
CASES = {
    "three times the running requests": Case(FIRST, GREEDY, reset=True),
    "prefix hits": Case(SECOND, GREEDY),
    "one at a time": Case(FIRST, GREEDY, together=False, reset=True),
    "frequency penalty": Case(FIRST, {**GREEDY, "frequency_penalty": 0.4}),
    "logprobs": Case(FIRST, GREEDY, logprobs=2),
}
LIMITS = {"chunked_prefill_size": 32, "disable_overlap_schedule": True}
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
    served, _ = run_sglang(model, list(CASES.values()), drafted=False, **LIMITS)
    return dict(zip(CASES, served, strict=True))


@cache
def answers(model: Path, drafter: Path, setting: str) -> dict[str, Answer]:
    served, _ = run_sglang(
        model,
        list(CASES.values()),
        method="lyanna",
        options=SETTINGS[setting],
        draft_model=drafter,
        chunked_prefill_size=32,
        page_size=16 if setting == "alone" else 1,
    )
    return dict(zip(CASES, served, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path, drafter: Path, setting: str, case: str
) -> None:
    plain = plain_answers(tiny_llama)[case]
    drafted = answers(tiny_llama, drafter, setting)[case]
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0


@pytest.mark.parametrize(("chunk", "page"), [(1024, 1), (96, 16)])
def test_the_layers_states_are_those_of_pytorch(
    tiny_llama: Path, drafter: Path, tmp_path: Path, chunk: int, page: int
) -> None:
    """Prompts read whole and in pieces, and hits that end before, at and after a page's end."""
    prompts = parting_prompts(300, [31, 32, 33, 250, 299])
    prompts.append(prompts[0])
    (answer,), _ = run_sglang(
        tiny_llama,
        [Case(prompts, GREEDY, together=False)],
        method="lyanna",
        draft_model=drafter,
        variables={VARIABLE: str(tmp_path / "states")},
        max_running_requests=1,
        chunked_prefill_size=chunk,
        page_size=page,
    )
    # A hit ends where the token after it is the same too.
    hits = [0, 30, 31, 32, 249, 298, 298]
    assert answer.cached == [hit // page * page for hit in hits]
    check_states(tiny_llama, drafter, prompts, answer.tokens, tmp_path / "states")


def test_what_was_learnt_by_heart_is_accepted(tiny_llama: Path, tmp_path: Path) -> None:
    """So the layer's KV is that of the text: alone, all together, and after prefix hits."""
    learnt = make_by_heart(tiny_llama, tmp_path / "drafter")
    settings = {**GREEDY, "max_new_tokens": LENGTH}
    served, _ = run_sglang(
        tiny_llama,
        [Case(PROMPTS, settings), Case(PROMPTS, settings, together=False)],
        method="lyanna",
        options={"resample": False},
        draft_model=tmp_path / "drafter",
    )
    assert learnt.mean_accepted_tokens > 3.8
    for answer in served:
        counters = answer.counters
        # The host goes on for a step with a request that has ended.
        assert counters["emitted"] / counters["steps"] > 3.3


def test_the_joint_distribution_is_the_targets_own(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target = make_tiny_llama(tmp_path / "target", vocab_size=10, sharpness=3.0)
    save(drafter_for(target, hot_tokens=10), tmp_path / "drafter")
    sampling = {"temperature": 1.3, "top_k": 8, "max_new_tokens": 4, "ignore_eos": True}
    (answer,), _ = run_sglang(
        target,
        [Case([[3, 7, 4]] * 8_000, sampling)],
        method="lyanna",
        options={"nodes": 6},
        draft_model=tmp_path / "drafter",
        max_running_requests=64,
        context_length=128,
        log_level="error",
    )
    assert answer.counters["accepted_tokens"] > 0.1 * answer.counters["steps"]
    assert p_value(answer.tokens, exact_joint(target, [3, 7, 4], 10, 1.3, 8)) > 0.001


def test_retracted_requests_go_on_as_if_they_had_not_been(tiny_llama: Path, drafter: Path) -> None:
    case = Case(some_prompts(8, longest=30), {**GREEDY, "max_new_tokens": 300})
    (plain,), _ = run_sglang(tiny_llama, [case], drafted=False)
    (drafted,), _ = run_sglang(
        tiny_llama,
        [case],
        method="lyanna",
        draft_model=drafter,
        max_total_tokens=900,
        schedule_conservativeness=0.01,
        # The host then admits requests as if they were to write 16 tokens each.
        variables={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
    )
    assert sum(drafted.retractions) > 0
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 0


def test_bench_gives_its_figures(smollm2: Path, tmp_path: Path) -> None:
    check_figures("sglang", smollm2, tmp_path)


def test_the_demo_with_the_drafter_that_comes_along() -> None:
    check_demo("sglang")


def test_another_targets_drafter_is_refused(drafter: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path, seed=5)
    with pytest.raises(RunFailed, match="whose weights are not those of the target"):
        run_sglang(other, [], method="lyanna", draft_model=drafter)
