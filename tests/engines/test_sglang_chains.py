"""SGLang where trees cannot be verified: chains on its own attention and state handling.

SGLang has no kernels for recurrent layers on a CPU. Here those for GPUs run in Triton's
interpreter, and its own functions keep the states of a chain and choose among them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafted_chains import proves_chains
from random_prompts import some_prompts
from recurrent_on_cpu import ENVIRONMENT
from sglang_runs import Answer, Case, run_sglang

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
PENALTIES = [
    GREEDY | {"frequency_penalty": 0.5},
    GREEDY | {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    GREEDY | {"custom_params": {"drafttree": False}},
    GREEDY | {"max_new_tokens": 3},
]

ANNOUNCED = "Token Recycling drafts chains of up to"

LONGEST = {"minicpm3": 31, "lfm2": 7}

ENGINE: dict[str, Any] = {"chunked_prefill_size": 64}

RECURRENT = ENGINE | {"disable_overlap_schedule": True, "variables": ENVIRONMENT}


def some_cases() -> list[Case]:
    """Many requests at once, one after another, and with parameters that follow the text.

    With the same prompts again, nearly everything is copied, so the longest chains are accepted.
    Some prompts are read in parts.
    """
    return [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(3, seed=4), GREEDY, together=False),
        Case(some_prompts(4, seed=6), PENALTIES),
        Case(some_prompts(4, seed=9, shortest=70, longest=160), GREEDY),
    ]


def check_drafted(family: str, drafted: list[Answer], log: str) -> None:
    longest = LONGEST[family]
    for answer in drafted:
        proves_chains(answer.counters, longest)
    copied = drafted[1].counters
    assert copied["draft_tokens"] > longest / 2 * copied["drafted_steps"]
    assert copied["accepted_tokens"] > 0.8 * copied["draft_tokens"]
    assert log.count(f"{ANNOUNCED} {longest} tokens and no trees, because the model") == 1


def test_latent_attention(without_trees: Callable[[str], Path]) -> None:
    model = without_trees("minicpm3")
    plain, _ = run_sglang(model, some_cases(), drafted=False, **ENGINE)
    drafted, log = run_sglang(model, some_cases(), **ENGINE)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    check_drafted("minicpm3", drafted, log)
    # The second time all prompts are found in the cache.
    assert min(drafted[1].cached) > 0


@pytest.mark.full
def test_recurrent_layers(without_trees: Callable[[str], Path]) -> None:
    model = without_trees("lfm2")
    plain, _ = run_sglang(model, some_cases(), drafted=False, **RECURRENT)
    drafted, log = run_sglang(model, some_cases(), **RECURRENT)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    check_drafted("lfm2", drafted, log)


@pytest.mark.full
def test_sizes_are_chosen_by_measured_forwards(without_trees: Callable[[str], Path]) -> None:
    """With `nodes=auto` a repeated text is drafted for and others are not."""
    model = without_trees("minicpm3")
    case = Case(some_prompts(1), GREEDY | {"max_new_tokens": 300}, rounds=3)
    (plain,), _ = run_sglang(model, [case], drafted=False, **ENGINE)
    (drafted,), log = run_sglang(model, [case], {"nodes": "auto"}, **ENGINE)
    assert drafted.tokens == plain.tokens
    assert "cannot be timed" not in log
    counters = drafted.counters
    assert counters["accepted_tokens"] > 10
    assert counters["steps"] > counters["drafted_steps"] > 0
    assert counters["draft_tokens"] <= LONGEST["minicpm3"] * counters["drafted_steps"]


@pytest.mark.full
@pytest.mark.parametrize("family", ["minicpm3", "lfm2"])
def test_retracted_requests(without_trees: Callable[[str], Path], family: str) -> None:
    """The KV cache has room for only a part of the running requests' tokens."""
    model = without_trees(family)
    case = Case(some_prompts(8, seed=8, shortest=20), GREEDY | {"max_new_tokens": 120})
    engine = ENGINE if family == "minicpm3" else RECURRENT
    (plain,), _ = run_sglang(model, [case], drafted=False, **engine)
    # SGLang then admits requests as if each would generate 16 tokens.
    estimate = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
    cramped = engine | {
        "variables": engine.get("variables", {}) | estimate,
        "max_total_tokens": 700,
        "schedule_conservativeness": 0.01,
    }
    if family == "minicpm3":
        cramped["disable_overlap_schedule"] = False
    (drafted,), log = run_sglang(model, [case], {"tree": "branch:2-1-1-1-1-1"}, **cramped)
    assert drafted.tokens == plain.tokens
    assert sum(drafted.retractions) > 0
    assert "KV cache pool is full. Retract requests." in log
    proves_chains(drafted.counters, 6)
