"""Every way in which Token Recycling drafts gives plain decoding's tokens, in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from random_prompts import some_prompts
from recycling_ways import WAYS
from vllm_runs import Answer, Case, run_vllm

from recycle_plugin.priming import prepare

GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
FIRST = some_prompts(12)
# Once more, on top of each prompt, and read in several parts among the others.
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(12, 4, 300), strict=True)]
CASES = [Case(FIRST, GREEDY), Case(SECOND, GREEDY)]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 400}


@cache
def plain_answers(model: Path) -> list[Answer]:
    served, _ = run_vllm(model, CASES, max_num_seqs=4)
    return served


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_every_way_of_drafting_gives_plain_tokens(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None], options: dict[str, object]
) -> None:
    if options.get("prime"):
        prepare(tiny_llama, 8)
    served, log = run_vllm(
        tiny_llama, CASES, speculative={"method": "token_recycling", **options}, **LIMITS
    )
    for drafted, plain in zip(served, plain_answers(tiny_llama), strict=True):
        assert drafted.tokens == plain.tokens
        assert drafted.counters["accepted_tokens"] > 0
        if options.get("nodes") != 3:
            proves_drafting(drafted)
    assert ("Token Recycling is primed from" in log) == bool(options.get("prime"))


def test_drafts_that_pay_are_tried(tiny_llama: Path) -> None:
    """Which numbers of nodes pay is the machine's to say; but one text again and again is foreseen
    so well that some do."""
    case = Case(FIRST[:1], {**GREEDY, "max_tokens": 300}, rounds=3)
    (plain,), _ = run_vllm(tiny_llama, [case], max_num_seqs=1)
    (drafted,), _ = run_vllm(
        tiny_llama,
        [case],
        speculative={"method": "token_recycling", "nodes": "auto"},
        max_num_seqs=1,
    )
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 10
    assert drafted.counters["steps"] > drafted.counters["drafted_steps"] > 0


def test_what_was_learnt_is_kept_in_a_file(
    tiny_llama: Path, proves_drafting: Callable[[Answer], None], tmp_path: Path
) -> None:
    file = tmp_path / "kept" / "learnt.safetensors"
    options = {"method": "token_recycling", "nodes": 31, "hot_start": str(file)}
    once = [Case(FIRST[:1], GREEDY)]
    (cold,), _ = run_vllm(tiny_llama, once, speculative=options, **LIMITS)
    assert file.is_file()
    (warm,), _ = run_vllm(tiny_llama, once, speculative=options, **LIMITS)
    assert warm.tokens == cold.tokens == [plain_answers(tiny_llama)[0].tokens[0]]
    # The very text was decoded before, so its second decoding takes far fewer steps.
    proves_drafting(warm)
    assert warm.counters["steps"] < 0.7 * cold.counters["steps"]

    content = file.read_bytes()
    file.write_bytes(content[:-100])
    (anew,), log = run_vllm(tiny_llama, once, speculative=options, **LIMITS)
    assert anew.tokens == cold.tokens
    assert anew.counters == cold.counters
    assert "learnt.safetensors is damaged" in log
    assert file.read_bytes() == content[:-100]
