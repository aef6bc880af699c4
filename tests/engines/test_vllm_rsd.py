"""RSD through the real vLLM: the target's tokens, its distribution, and the draft model's KV."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from joint_distribution import exact_joint, p_value
from random_prompts import some_prompts
from rsd_bench import check_figures
from tiny_models import make_first_layers, make_tiny_llama
from vllm_runs import Answer, Case, RunFailed, run_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
VOCAB = 10
PROMPT = [3, 7, 4]
REQUESTS = 20_000
FAULTY = 5_000
SAMPLING: dict[str, Any] = {"temperature": 1.3, "top_k": 8, "max_tokens": 4, "ignore_eos": True}


FIRST = some_prompts(24)
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
CASES = {
    "many": Case(FIRST, GREEDY),
    "a second turn": Case(SECOND, GREEDY),
    "read in pieces": Case(some_prompts(8, seed=5, longest=400), GREEDY),
    "repetition penalty": Case(FIRST, {**GREEDY, "repetition_penalty": 1.2}),
    "logprobs": Case(FIRST[:8], {**GREEDY, "logprobs": 2}),
    "long": Case(FIRST[:4], {**GREEDY, "max_tokens": 500}),
    "greedy beside sampled": Case(
        FIRST[:12], [GREEDY if row % 2 else {**GREEDY, "temperature": 1.0} for row in range(12)]
    ),
}
LIMITS = {"max_num_batched_tokens": 200}


@pytest.fixture(scope="module")
def draft(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's first layer."""
    return make_first_layers(tiny_llama, tmp_path_factory.mktemp("draft"), 1)


@cache
def plain_answers(model: Path) -> dict[str, Answer]:
    served, _ = run_vllm(model, list(CASES.values()), **LIMITS)
    return dict(zip(CASES, served, strict=True))


@cache
def answers(model: Path, draft: Path, tree: str, compiled: bool) -> dict[str, Answer]:
    served, _ = run_vllm(
        model,
        list(CASES.values()),
        speculative={"method": "rsd", "model": str(draft), "tree": tree},
        enforce_eager=not compiled,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if compiled else "0"},
        **LIMITS,
    )
    return dict(zip(CASES, served, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tree", "compiled"), [("beam:3x4", False), ("branch:3-2-1", True)])
def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path,
    draft: Path,
    proves_drafting: Callable[[Answer], None],
    tree: str,
    compiled: bool,
    case: str,
) -> None:
    plain = plain_answers(tiny_llama)[case]
    drafted = answers(tiny_llama, draft, tree, compiled)[case]
    greedy = slice(1, None, 2) if case == "greedy beside sampled" else slice(None)
    assert drafted.tokens[greedy] == plain.tokens[greedy]
    proves_drafting(drafted)
    for mine, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert (mine[0] is None) == (theirs[0] is None)
        for best, expected in zip(mine[0] or (), theirs[0] or (), strict=True):
            assert best == pytest.approx(expected, abs=1e-3)


ADJUSTED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {7: 2.0, 9: -3.0},
}


def always_accepted(model: Path, cases: list[Case], **engine: Any) -> list[Answer]:
    """Serve with the target as its own draft model: if its KV is that of a fresh prefill, all is
    accepted, and no request takes more steps than five tokens each make."""
    served, _ = run_vllm(
        model,
        cases,
        speculative={"method": "rsd", "model": str(model), "tree": "branch:1-1-1-1"},
        **engine,
    )
    for case, answer in zip(cases, served, strict=True):
        assert isinstance(case.sampling, dict)
        steps = ceil((case.sampling["max_tokens"] - 1) / 5)
        assert 0 < answer.counters["steps"] <= steps * len(case.prompts)
    return served


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_accepted(
    tiny_llama: Path, temperature: float
) -> None:
    """Over 500 tokens, ends inside a tree, prompts read in pieces, prefix hits, prompts that
    part right after a block of 128 tokens, and penalties and biases along the drafts."""
    settings = {**GREEDY, "temperature": temperature, "max_tokens": 503}
    short = {**settings, "max_tokens": 41}
    long = [[*prompt, *range(2, 400)][:400] for prompt in some_prompts(4, seed=6, longest=400)]
    always_accepted(
        tiny_llama,
        [
            Case(long, settings),
            Case(long, {**short, **ADJUSTED}),
            Case([[*prompt, 5, 6, 7] for prompt in long], short),
            Case([[*prompt[:256], row, 5, 6] for row, prompt in enumerate(long, 9)], short),
            Case([[*long[0][:256], row] for row in range(20, 26)], short),
        ],
        max_num_batched_tokens=300,
    )


def test_preempted_requests_go_on_as_if_they_had_not_been(
    tiny_llama: Path, draft: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    case = Case(some_prompts(6, longest=30), {**GREEDY, "max_tokens": 300})
    (plain,), _ = run_vllm(tiny_llama, [case])
    (drafted,), _ = run_vllm(
        tiny_llama,
        [case],
        speculative={"method": "rsd", "model": str(draft), "tree": "beam:3x3"},
        num_gpu_blocks_override=11,
    )
    (own,) = always_accepted(tiny_llama, [case], num_gpu_blocks_override=11)
    for answer in (drafted, own):
        assert answer.preemptions > 0
        assert answer.tokens == plain.tokens
    proves_drafting(drafted)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model of a small vocabulary."""
    target = make_tiny_llama(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, sharpness=3.0)
    return target, make_first_layers(target, tmp_path_factory.mktemp("small-draft"), 1)


def sample(pair: tuple[Path, Path], tree: str, cases: list[Case], **engine: Any) -> list[Answer]:
    served, _ = run_vllm(
        pair[0],
        cases,
        speculative={"method": "rsd", "model": str(pair[1]), "tree": tree},
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=128,
        **engine,
    )
    return served


def joint_p_value(pair: tuple[Path, Path], answer: Answer) -> float:
    joint = exact_joint(pair[0], PROMPT, VOCAB, SAMPLING["temperature"], SAMPLING["top_k"])
    return p_value([samples[0] for samples in answer.tokens], joint)


def test_the_joint_distribution_is_the_targets_own(pair: tuple[Path, Path]) -> None:
    (answer,) = sample(pair, "beam:3x3", [Case([PROMPT] * REQUESTS, SAMPLING)])
    assert answer.counters["accepted_tokens"] > 0.3 * answer.counters["steps"]
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert joint_p_value(pair, answer) > 0.001


def test_a_planted_fault_is_found(pair: tuple[Path, Path]) -> None:
    cases = [Case([PROMPT] * FAULTY, SAMPLING)]
    (answer,) = sample(pair, "beam:3x3", cases, planted_fault="residual")
    assert joint_p_value(pair, answer) < 1e-6


def test_a_seed_repeats_whatever_shares_the_batch(pair: tuple[Path, Path]) -> None:
    long = {**SAMPLING, "max_tokens": 40, "min_p": 0.01}
    seeded = [{**long, "seed": seed} for seed in (1, 2, 3)]
    others = [PROMPT[:1] * length for length in (5, 9, 17)]
    cases = [
        Case([PROMPT] * 3, seeded),
        Case([*others, *([PROMPT] * 3)], [long, long, long, *seeded]),
        *(Case([PROMPT], one) for one in seeded),
    ]
    together, mixed, *alone = sample(pair, "beam:3x3", cases)
    assert together.counters["accepted_tokens"] > 0
    assert mixed.tokens[3:] == together.tokens == [one.tokens[0] for one in alone]
    assert len({tuple(samples[0]) for samples in together.tokens}) == 3


def test_heads_that_cannot_stand_side_by_side_are_said(tiny_llama: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path, heads=2)
    with pytest.raises(RunFailed, match=r"2 KV heads of size 32 but \[2, 4\] query heads"):
        run_vllm(tiny_llama, [], speculative={"method": "rsd", "model": str(draft)})


def test_bench_gives_the_figures_of_the_field(smollm2: Path, tmp_path: Path) -> None:
    check_figures("vllm", smollm2, tmp_path)
