"""Sampling with draft trees draws from the model's own distribution, end to end.

The joint of the first three tokens of 20,000 requests is held against the exact one, computed
from the model by enumeration. A planted fault shows that the test can fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from joint_distribution import exact_joint, p_value
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_tiny_llama

VOCAB = 10
PROMPT = [3, 7, 4]
REQUESTS = 20_000
FAULTY = 5_000
SAMPLING = {"temperature": 1.3, "top_k": 8, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-vocabulary")
    return make_tiny_llama(folder, vocab_size=VOCAB, sharpness=3.0)


def run(model: Path, requests: int, **arguments: Any) -> Answer:
    (answer,), _ = run_sglang(
        model,
        [Case([PROMPT] * requests, SAMPLING)],
        options={"tree": "branch:3-2-1"},
        max_running_requests=64,
        context_length=128,
        log_level="error",
        **arguments,
    )
    return answer


def joint_p_value(model: Path, answer: Answer) -> float:
    joint = exact_joint(model, PROMPT, VOCAB, SAMPLING["temperature"], SAMPLING["top_k"])
    return p_value(answer.tokens, joint)


def test_the_joint_distribution_is_the_models_own(model: Path) -> None:
    answer = run(model, REQUESTS)
    accepted_a_step = answer.counters["accepted_tokens"] / answer.counters["steps"]
    assert 0.3 < accepted_a_step < 0.9
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert joint_p_value(model, answer) > 0.001


def test_a_planted_fault_is_found(model: Path) -> None:
    assert joint_p_value(model, run(model, FAULTY, planted_fault="most likely")) < 1e-6
