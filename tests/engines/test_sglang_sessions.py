"""Streaming sessions in SGLang, whose next turn continues from the KV of the last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang
from tiny_models import make_first_layers

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
STOPPED = GREEDY | {"ignore_eos": False, "stop_token_ids": [*range(0, 512, 8)]}
OPTED_OUT = GREEDY | {"custom_params": {"drafttree": False}}
CASES = [
    Case(some_prompts(6, shortest=1, longest=40), GREEDY, session=True),
    Case(some_prompts(6, seed=4, shortest=1, longest=40), STOPPED, session=True),
    Case(some_prompts(6, seed=5, shortest=1, longest=40), OPTED_OUT, session=True),
]
SETTINGS: dict[str, Any] = {"enable_streaming_session": True, "chunked_prefill_size": 32}


@cache
def plain_answers(model: Path) -> list[Answer]:
    answers, _ = run_sglang(model, CASES, drafted=False, disable_overlap_schedule=True, **SETTINGS)
    return answers


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize("method", ["token-recycling", "rsd"])
def test_turns_equal_plain_decoding(
    tiny_llama: Path,
    tmp_path: Path,
    proves_drafting: Callable[[Answer], None],
    method: str,
    page_size: int,
) -> None:
    recycles = method == "token-recycling"
    drafted, _ = run_sglang(
        tiny_llama,
        CASES,
        {"nodes": 15} if recycles else {"tree": "beam:3x3"},
        method=method,
        draft_model=None if recycles else make_first_layers(tiny_llama, tmp_path, 1),
        page_size=page_size,
        **SETTINGS,
    )
    greedy, stopped, opted_out = drafted
    for answer in (greedy, stopped):
        proves_drafting(answer)
    assert opted_out.counters["draft_tokens"] == 0
    assert "stop" in stopped.reasons
    for plain, answer in zip(plain_answers(tiny_llama), drafted, strict=True):
        assert answer.tokens == plain.tokens
        # The next turn computes the last token alone, and what is new.
        assert answer.cached == plain.cached
        assert all(answer.cached[1:])
