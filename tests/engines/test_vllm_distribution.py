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
from tiny_models import make_tiny_llama
from vllm_runs import Answer, Case, run_vllm

VOCAB = 10
PROMPT = [3, 7, 4]
REQUESTS = 20_000
FAULTY = 5_000
AHEAD = 10_000
FREE = {"temperature": 1.3, "max_tokens": 4, "ignore_eos": True}
SAMPLING = {**FREE, "top_k": 8}
GREEDY = {**FREE, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-vocabulary")
    return make_tiny_llama(folder, vocab_size=VOCAB, sharpness=3.0)


def serve(model: Path, cases: list[Case], **arguments: Any) -> tuple[list[Answer], str]:
    return run_vllm(
        model,
        cases,
        speculative={"method": "token_recycling", "tree": "branch:3-2-1"},
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=128,
        **arguments,
    )


def run(model: Path, requests: int, **arguments: Any) -> Answer:
    (answer,), _ = serve(model, [Case([PROMPT] * requests, SAMPLING)], **arguments)
    return answer


def joint_p_value(model: Path, answer: Answer, top_k: int = SAMPLING["top_k"]) -> float:
    joint = exact_joint(model, PROMPT, VOCAB, SAMPLING["temperature"], top_k)
    return p_value([samples[0] for samples in answer.tokens], joint)


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
    ahead = drawing_ahead.ENVIRONMENT
    (free,), log = serve(model, [Case([PROMPT] * AHEAD, FREE)], environment=ahead)
    check_drafting(free)
    assert joint_p_value(model, free, top_k=VOCAB) > 0.001
    assert log.count(drawing_ahead.DRAWN) >= free.counters["steps"] / 64


def test_greedy_requests_among_those_drawn_ahead_stay_greedy(model: Path) -> None:
    cases = [Case([PROMPT], GREEDY), Case([PROMPT] * 64, [FREE, GREEDY] * 32)]
    (greedy, mixed), log = serve(model, cases, environment=drawing_ahead.ENVIRONMENT)
    assert mixed.tokens[1::2] == greedy.tokens * 32
    assert mixed.tokens[0::2] != greedy.tokens * 32
    assert log.count(drawing_ahead.DRAWN) >= mixed.counters["steps"] / 64


def test_a_planted_fault_is_found(model: Path) -> None:
    assert joint_p_value(model, run(model, FAULTY, planted_fault="most likely")) < 1e-6
