"""Greedy decoding in float32 gives the same tokens with draft trees as without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang

GREEDY = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}


FIRST = some_prompts(24)
# A second turn after each prompt, as a chat would send it: its beginning is in the cache.
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(24, seed=4), strict=True)]
CASES = {
    "three times the running requests": Case(FIRST, GREEDY, reset=True),
    "prefix hits": Case(SECOND, GREEDY),
    "one at a time": Case(FIRST, GREEDY, together=False, reset=True),
    "again after a flush": Case(SECOND, GREEDY, together=False, reset=True),
}
LONG = Case(some_prompts(12, seed=8), {**GREEDY, "max_new_tokens": 160})
STREAMED = Case(FIRST[:8], {**GREEDY, "max_new_tokens": 64}, stream=True)


@cache
def plain_answers(model: Path) -> dict[str, Answer]:
    cases = {**CASES, "long": LONG, "streamed": STREAMED}
    served, _ = run_sglang(model, list(cases.values()), drafted=False, chunked_prefill_size=32)
    return dict(zip(cases, served, strict=True))


@cache
def answers(model: Path, nodes: int, page: int, overlap: bool) -> dict[str, Answer]:
    served, _ = run_sglang(
        model,
        list(CASES.values()),
        options={"nodes": nodes, "hot_start": nodes != 32},
        page_size=page,
        disable_overlap_schedule=not overlap,
        # Most prompts need several chunks.
        chunked_prefill_size=32,
    )
    return dict(zip(CASES, served, strict=True))


PAIRWISE = [
    # nodes, page, overlap
    (80, 1, True),
    (80, 16, False),
    (32, 16, True),
    (8, 1, False),
]
FULL = [each for each in product((8, 32, 80), (1, 16), (False, True)) if each not in PAIRWISE]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("nodes", "page", "overlap"),
    [*PAIRWISE, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)],
)
def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    nodes: int,
    page: int,
    overlap: bool,
    case: str,
) -> None:
    plain = plain_answers(tiny_llama)[case]
    drafted = answers(tiny_llama, nodes, page, overlap)[case]
    assert drafted.tokens == plain.tokens
    assert drafted.reasons == plain.reasons
    proves_drafting(drafted)
    if case == "prefix hits":
        assert sum(drafted.cached) > 0
    counters = drafted.counters
    # With overlapping scheduling a request that has ended runs one more step.
    assert counters["emitted"] >= 24 * (GREEDY["max_new_tokens"] - 1)
    assert counters["emitted"] == counters["steps"] + counters["accepted_tokens"]
    if not overlap:
        assert counters["emitted"] == 24 * (GREEDY["max_new_tokens"] - 1)


def test_retraction_does_not_change_tokens(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """The KV cache has room for only a part of the running requests' tokens."""
    plain = plain_answers(tiny_llama)["long"]
    (drafted,), log = run_sglang(
        tiny_llama,
        [LONG],
        options={"nodes": 8},
        max_total_tokens=700,
        schedule_conservativeness=0.01,
        # SGLang then admits requests as if each would generate 16 tokens.
        variables={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
    )
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    assert "KV cache pool is full. Retract requests." in log


@pytest.mark.parametrize("overlap", [False, True])
def test_no_running_request_waits_because_others_draft(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None], overlap: bool
) -> None:
    """Every step serves all requests: between two pieces of one come only a few of another."""
    (drafted,), _ = run_sglang(tiny_llama, [STREAMED], disable_overlap_schedule=not overlap)
    assert drafted.tokens == plain_answers(tiny_llama)["streamed"].tokens
    proves_drafting(drafted)
    last = {row: len(drafted.pieces) - drafted.pieces[::-1].index(row) for row in range(8)}
    since: dict[int, Counter[int]] = {}
    for place, row in enumerate(drafted.pieces):
        for waiting, others in since.items():
            if waiting != row and place < last[waiting]:
                others[row] += 1
                assert others[row] <= 3, f"{row} had {others[row]} pieces while {waiting} waited"
        since[row] = Counter()
    assert len(since) == 8


def test_smollm2_tokens_equal_plain_decoding(
    smollm2: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [
        tokenizer(text)["input_ids"]
        for text in (
            "The capital of France is",
            "def fibonacci(n):\n    ",
            "Question: What is 2 + 2?\nAnswer:",
            "List the numbers from one to ten: one, two, three,",
        )
    ]
    case = Case(prompts, {**GREEDY, "max_new_tokens": 24}, rounds=2)
    (plain,), _ = run_sglang(smollm2, [case], drafted=False)
    (drafted,), _ = run_sglang(smollm2, [case])
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    assert drafted.counters["emitted"] > 1.3 * drafted.counters["steps"]
