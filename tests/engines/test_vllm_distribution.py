"""Sampling with draft trees draws from the model's own distribution, end to end.

The joint of the first three tokens of 20,000 requests is held against the exact one, computed
from the model by enumeration. A planted fault shows that the test can fail.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny_models import make_tiny_llama
from vllm_runs import Answer, Case, run_vllm

VOCAB = 10
PROMPT = [3, 7, 4]
REQUESTS = 20_000
SAMPLING = {"temperature": 1.3, "top_k": 8, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-vocabulary")
    return make_tiny_llama(folder, vocab_size=VOCAB, sharpness=3.0)


def exact_joint(model: Path) -> dict[tuple[int, ...], float]:
    """The probability of every first three tokens, after temperature and top-k."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prefixes = [PROMPT + list(pair) for pair in product(range(VOCAB), repeat=2)]
    with torch.no_grad():
        logits = network(torch.tensor(prefixes)).logits / SAMPLING["temperature"]
    kept = logits.topk(SAMPLING["top_k"]).values[..., -1:]
    probabilities = logits.masked_fill(logits < kept, -torch.inf).softmax(-1).double()
    start = len(PROMPT) - 1
    return {
        (a, b, c): float(
            probabilities[a * VOCAB + b, start, a]
            * probabilities[a * VOCAB + b, start + 1, b]
            * probabilities[a * VOCAB + b, start + 2, c]
        )
        for a, b, c in product(range(VOCAB), repeat=3)
    }


def p_value(answer: Answer, joint: dict[tuple[int, ...], float]) -> float:
    """Chi-square over the cells expected at least 5 times; all others are one cell."""
    counts = Counter(tuple(samples[0][:3]) for samples in answer.tokens)
    assert sum(counts.values()) == REQUESTS
    large = [cell for cell, probability in joint.items() if probability * REQUESTS >= 5]
    observed = np.array([counts[cell] for cell in large], float)
    expected = np.array([joint[cell] for cell in large]) * REQUESTS
    rest = REQUESTS - expected.sum()
    if rest > 0:
        observed = np.append(observed, REQUESTS - observed.sum())
        expected = np.append(expected, rest)
    return float(chisquare(observed, expected * REQUESTS / expected.sum()).pvalue)


def run(model: Path, planted_fault: bool) -> Answer:
    (answer,), _ = run_vllm(
        model,
        [Case([PROMPT] * REQUESTS, SAMPLING)],
        speculative={"method": "token_recycling", "tree": "branch:3-2-1"},
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=128,
        planted_fault=planted_fault,
    )
    return answer


def test_the_joint_distribution_is_the_models_own(model: Path) -> None:
    answer = run(model, planted_fault=False)
    accepted_a_step = answer.counters["accepted_tokens"] / answer.counters["steps"]
    assert 0.3 < accepted_a_step < 0.9
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert p_value(answer, exact_joint(model)) > 0.001


def test_a_planted_fault_is_found(model: Path) -> None:
    assert p_value(run(model, planted_fault=True), exact_joint(model)) < 1e-6
