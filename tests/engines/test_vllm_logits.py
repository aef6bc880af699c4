"""Logits that are computed and read in chunks give the same tokens as those of a whole step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_chunks
from random_prompts import some_prompts
from tiny_models import add_byte_tokenizer, make_tiny_llama
from vllm_runs import Answer, Case, run_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.6, "seed": 17}
PROMPTS = some_prompts(8, longest=90)
CASES = {
    "greedy": Case(PROMPTS, GREEDY, rounds=2),
    "seeded": Case(PROMPTS, SEEDED, rounds=2),
    "logprobs": Case(PROMPTS, GREEDY | {"logprobs": 4, "prompt_logprobs": 2}, rounds=2),
    "penalties": Case(PROMPTS, SEEDED | {"repetition_penalty": 1.1}, rounds=2),
}
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 1024}


def test_all_kinds_of_sampling(tiny_llama: Path, proves_drafting: Callable[[Answer], None]) -> None:
    plain, _ = run_vllm(tiny_llama, [*CASES.values()], **LIMITS)
    method = {"method": "token_recycling", "nodes": 31, "memory": 0}
    drafted, log = run_vllm(
        tiny_llama, [*CASES.values()], method, small_chunks.ENVIRONMENT, **LIMITS
    )
    assert small_chunks.SEVERAL in log
    assert "of up to 128 nodes, which max_num_batched_tokens and max_num_seqs allow, take" in log
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
    ours, theirs = (
        [sorted(top) for request in each[2].logprobs for top in request[0]]
        for each in (drafted, plain)
    )
    assert ours == theirs


@pytest.mark.full
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_grammars(
    sampling: dict[str, Any], tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """Their masks are applied to chunks as well."""
    model = add_byte_tokenizer(make_tiny_llama(tmp_path))
    grammar = {"choice": ["abcabcabc", "bcdbcdbcd"]}
    letters = {"structured": grammar, "ignore_eos": False}
    settings = [sampling | (letters if row % 2 else {}) for row in range(8)]
    case = Case(PROMPTS, settings, rounds=2)
    engine: dict[str, Any] = {**LIMITS, "skip_tokenizer_init": False}
    (plain,), _ = run_vllm(model, [case], **engine)
    method = {"method": "token_recycling", "nodes": 31, "memory": 0}
    (drafted,), log = run_vllm(model, [case], method, small_chunks.ENVIRONMENT, **engine)
    assert small_chunks.SEVERAL in log
    assert drafted.tokens == plain.tokens
    assert {len(request[0]) for request in drafted.tokens} == {10, 40}
    proves_drafting(drafted)
