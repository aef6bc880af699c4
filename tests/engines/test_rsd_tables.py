"""RSD in both engines with Token Recycling's tables."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hosts import Answer, Case, Host
from random_prompts import some_prompts
from tiny_models import make_first_layers, make_tiny_llama

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
PROMPTS = some_prompts(12)
CASES = {
    "the first time": Case(PROMPTS, GREEDY),
    "chunked prefill": Case(some_prompts(6, seed=5, longest=400), GREEDY),
    "penalties": Case(PROMPTS, {**GREEDY, "repetition_penalty": 1.2}),
    "logprobs": Case(PROMPTS[:4], {**GREEDY, "logprobs": 2}),
    "greedy beside sampled": Case(
        PROMPTS, [GREEDY if row % 2 else {**GREEDY, "temperature": 1.0} for row in range(12)]
    ),
    "the same again": Case(PROMPTS[::-1], GREEDY),
}
CHUNKS = {"vllm": 200, "sglang": 32}
DEPTH = 3


@pytest.mark.parametrize("memory", [0, 1 << 16])
def test_greedy_tokens_equal_plain_decoding(
    host: Host,
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    tmp_path: Path,
    memory: int,
) -> None:
    """With a memory, answers that were given before are copied, deeper than the draft model's
    nodes."""
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    served: dict[str | None, list[Answer]] = {}
    tables = {"prime": bool(memory), "nodes": 10, "memory": memory}
    for method in (None, "rsd"):
        served[method], log = host.run(
            tiny_llama,
            [*CASES.values()],
            method,
            method and {"tree": f"beam:2x{DEPTH}", "tables": tables},
            method and draft,
            running=5,
            chunk=CHUNKS[host.name],
            # With overlapping scheduling plain SGLang's penalties lag by one token.
            sglang={"disable_overlap_schedule": True},
        )
    assert "Token Recycling's tables take" in log
    for name, without, drafted in zip(CASES, served[None], served["rsd"], strict=True):
        greedy = slice(1, None, 2) if name == "greedy beside sampled" else slice(None)
        assert drafted.tokens[greedy] == without.tokens[greedy], name
        if not memory:
            proves_drafting(drafted)
    again = served["rsd"][-1].counters
    if memory:
        assert again["emitted"] / again["steps"] > 1 + DEPTH


@pytest.mark.full
def test_the_draft_model_knows_what_tables_have_drafted(host: Host, tmp_path: Path) -> None:
    """The target is its own draft model, so that sampled requests accept all of its drafts.

    They do as long as the draft model's KV of all accepted tokens is right; the cases end inside
    trees, read prompts in chunks, and find prefixes in the cache. More tokens than those four and
    the bonus token are the tables', of answers that are nearly always the same.
    """
    target = make_tiny_llama(tmp_path, sharpness=400.0)
    sampled = {**GREEDY, "temperature": 0.1, "max_tokens": 203}
    cases = [
        Case(PROMPTS[:6], sampled),
        Case(some_prompts(4, seed=6, longest=400), sampled),
        Case([[*prompt, 5, 6] for prompt in PROMPTS[:6]], sampled),
        Case(PROMPTS[:6], sampled),
    ]
    options = {"tree": "branch:1-1-1-1", "tables": {"nodes": 6, "prime": False}}
    served, _ = host.run(
        target, cases, "rsd", options, target, chunk={"vllm": 300, "sglang": 32}[host.name]
    )
    for case, answer in zip(cases, served, strict=True):
        assert answer.counters["steps"] <= ceil(202 / 5) * len(case.prompts)
    again = served[-1].counters
    assert again["emitted"] > 5.5 * again["steps"]
