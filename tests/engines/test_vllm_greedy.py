"""Greedy decoding in float32 gives the same tokens with draft trees as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from vllm_runs import Answer, Case, run_vllm

GREEDY = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
VOCAB = 512


def chat_cases(hot: bool) -> list[Case]:
    """24 prompts, and then a second turn after each, as a chat would send it."""
    first = some_prompts(24)
    second = [prompt + more for prompt, more in zip(first, some_prompts(24, seed=4), strict=True)]
    return [Case(first, GREEDY, reset=not hot), Case(second, GREEDY, reset=not hot)]


@cache
def answers(
    model: Path, seqs: int, compiled: bool, processes: bool, options: tuple[Any, ...], hot: bool
) -> tuple[list[Answer], str]:
    return run_vllm(
        model,
        chat_cases(hot),
        speculative={"method": "token_recycling", **dict(options)} if options else None,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0"},
        max_num_seqs=seqs,
        enforce_eager=not compiled,
    )


PAIRWISE = [
    # seqs, nodes, hot, processes, compiled
    (1, 80, True, False, False),
    (8, 80, False, True, True),
    (8, 32, True, True, False),
    (1, 32, False, False, True),
    (8, 8, True, False, True),
    (1, 8, False, True, False),
]
FULL = [
    each
    for each in product((1, 8), (8, 32, 80), (True, False), (False, True), (False, True))
    if each not in PAIRWISE
]


@pytest.mark.parametrize(
    ("seqs", "nodes", "hot", "processes", "compiled"),
    [*PAIRWISE, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)],
)
def test_greedy_tokens_equal_plain_decoding(
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    seqs: int,
    nodes: int,
    hot: bool,
    processes: bool,
    compiled: bool,
) -> None:
    plain, _ = answers(tiny_llama, seqs, compiled, False, (), True)
    options = (("nodes", nodes), ("hot_start", hot))
    drafted, log = answers(tiny_llama, seqs, compiled, processes, options, hot)
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
        counters = with_trees.counters
        assert counters["emitted"] == 24 * (GREEDY["max_tokens"] - 1)
        assert counters["emitted"] == counters["steps"] + counters["accepted_tokens"]
    if compiled:  # otherwise nothing runs on a CPU before the first request
        rows = seqs * (1 + nodes)
        assert f"Logits of {rows} nodes" in log
        assert f"take {rows * VOCAB * 4 / 2**20:.1f} MiB" in log


@pytest.mark.parametrize("seqs", [1, 8])
def test_smollm2_tokens_equal_plain_decoding(
    smollm2: Path, proves_drafting: Callable[[Answer], None], seqs: int
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
    case = Case(prompts, GREEDY, rounds=2)
    (plain,), _ = run_vllm(smollm2, [case], max_num_seqs=seqs)
    (drafted,), _ = run_vllm(
        smollm2, [case], speculative={"method": "token_recycling"}, max_num_seqs=seqs
    )
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    assert drafted.counters["emitted"] > 1.3 * drafted.counters["steps"]
