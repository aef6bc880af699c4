"""RSD draws from the target's own distribution, end to end, and repeats what a seed gave.

The joint of the first three tokens of 20,000 requests is held against the exact one, computed
from the target by enumeration. A planted fault shows that the test can fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from joint_distribution import exact_joint, p_value
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_first_layers, make_tiny_llama

VOCAB = 10
PROMPT = [3, 7, 4]
REQUESTS = 20_000
FAULTY = 5_000
SAMPLING: dict[str, Any] = {
    "temperature": 1.3,
    "top_k": 8,
    "max_new_tokens": 4,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model of a small vocabulary."""
    target = make_tiny_llama(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, sharpness=3.0)
    return target, make_first_layers(target, tmp_path_factory.mktemp("draft"), 1)


def run(pair: tuple[Path, Path], tree: str, cases: list[Case], **engine: Any) -> list[Answer]:
    answers, _ = run_sglang(
        pair[0],
        cases,
        options={"tree": tree},
        method="rsd",
        draft_model=pair[1],
        max_running_requests=64,
        context_length=128,
        log_level="error",
        **engine,
    )
    return answers


def joint_p_value(pair: tuple[Path, Path], answer: Answer) -> float:
    joint = exact_joint(pair[0], PROMPT, VOCAB, SAMPLING["temperature"], SAMPLING["top_k"])
    return p_value(answer.tokens, joint)


def test_the_joint_distribution_is_the_targets_own(pair: tuple[Path, Path]) -> None:
    (answer,) = run(pair, "branch:2-2", [Case([PROMPT] * REQUESTS, SAMPLING)])
    assert answer.counters["accepted_tokens"] > 0.3 * answer.counters["steps"]
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert joint_p_value(pair, answer) > 0.001


def test_a_planted_fault_is_found(pair: tuple[Path, Path]) -> None:
    cases = [Case([PROMPT] * FAULTY, SAMPLING)]
    (answer,) = run(pair, "beam:3x3", cases, planted_fault="residual")
    assert joint_p_value(pair, answer) < 1e-6


def test_a_seed_repeats_whatever_shares_the_batch(pair: tuple[Path, Path]) -> None:
    long = {**SAMPLING, "max_new_tokens": 40}
    seeded = [{**long, "sampling_seed": seed} for seed in (1, 2, 3)]
    others = [PROMPT[:1] * length for length in (5, 9, 17)]
    cases = [
        Case([PROMPT] * 3, seeded),
        Case([*others, *([PROMPT] * 3)], [long, long, long, *seeded]),
        Case([PROMPT] * 3, seeded, together=False),
    ]
    together, mixed, alone = run(pair, "beam:3x3", cases)
    assert together.counters["accepted_tokens"] > 0
    assert mixed.tokens[3:] == together.tokens == alone.tokens
    assert len({tuple(tokens) for tokens in together.tokens}) == 3
