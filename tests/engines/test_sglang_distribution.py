"""Sampling with draft trees draws from the model's own distribution, end to end.

The joint of the first three tokens of 20,000 requests is held against the exact one, computed
from the model by enumeration. A planted fault shows that the test can fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drawing_ahead
import pytest
from joint_distribution import exact_joint, p_value
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_tiny_llama

VOCAB = 10
PROMPT = [3, 7, 4]
REQUESTS = 20_000
FAULTY = 5_000
AHEAD = 10_000
FREE = {"temperature": 1.3, "max_new_tokens": 4, "ignore_eos": True}
SAMPLING = {**FREE, "top_k": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-vocabulary")
    return make_tiny_llama(folder, vocab_size=VOCAB, sharpness=3.0)


def serve(model: Path, case: Case, **arguments: Any) -> tuple[Answer, str]:
    (answer,), log = run_sglang(
        model,
        [case],
        options={"tree": "branch:3-2-1"},
        max_running_requests=64,
        context_length=128,
        log_level="error",
        **arguments,
    )
    return answer, log


def run(model: Path, requests: int, **arguments: Any) -> Answer:
    return serve(model, Case([PROMPT] * requests, SAMPLING), **arguments)[0]


def joint_p_value(model: Path, answer: Answer, top_k: int = SAMPLING["top_k"]) -> float:
    joint = exact_joint(model, PROMPT, VOCAB, SAMPLING["temperature"], top_k)
    return p_value(answer.tokens, joint)


def check_drafting(answer: Answer) -> None:
    accepted_a_step = answer.counters["accepted_tokens"] / answer.counters["steps"]
    assert 0.3 < accepted_a_step < 0.9
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0


def test_the_joint_distribution_is_the_models_own(model: Path) -> None:
    answer = run(model, REQUESTS)
    check_drafting(answer)
    assert joint_p_value(model, answer) > 0.001


def test_so_it_is_where_tokens_are_drawn_ahead(model: Path) -> None:
    case = Case([PROMPT] * AHEAD, FREE)
    answer, log = serve(model, case, variables=drawing_ahead.ENVIRONMENT)
    check_drafting(answer)
    assert joint_p_value(model, answer, top_k=VOCAB) > 0.001
    assert log.count(drawing_ahead.DRAWN) >= answer.counters["steps"] / 64


def test_a_planted_fault_is_found(model: Path) -> None:
    assert joint_p_value(model, run(model, FAULTY, planted_fault="most likely")) < 1e-6
