"""Sessions of vLLM, whose prompts come one after another, and whose answers end at stop tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from vllm_sessions import Sessions, Turn, run_sessions

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
FIRST, SECOND = some_prompts(2, seed=3, longest=40)


@pytest.mark.parametrize("method", ["token_recycling", "rsd"])
@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.full)])
def test_a_turn_after_a_stop_token(
    runner: str, method: str, tiny_llama: Path, proves_drafting: Callable[[Sessions], None]
) -> None:
    """A stop token may be a draft, and accepted with drafts behind it that nobody may see.

    The same session comes again, as Token Recycling then copies the first one's answers.
    """
    limits: dict[str, Any] = {} if runner == "v1" else {"async_scheduling": False}
    probe = run_sessions(tiny_llama, [[(FIRST, GREEDY)]], None, runner, **limits)
    answer = probe.tokens[0][0]
    stop = next(token for at, token in enumerate(answer[5:], 5) if token not in answer[:at])
    turns: list[Turn] = [
        (FIRST, GREEDY | {"stop_token_ids": [stop]}),
        (SECOND, GREEDY),
        (SECOND, GREEDY),
    ]
    plain = run_sessions(tiny_llama, [turns] * 3, None, runner, **limits)
    assert plain.tokens[0][0][-1] == stop
    options: dict[str, dict[str, Any]] = {
        "token_recycling": {"nodes": 15},
        "rsd": {"model": str(tiny_llama), "tree": "beam:1x4"},
    }
    speculative = {"method": method, **options[method]}
    drafted = run_sessions(tiny_llama, [turns] * 3, speculative, runner, **limits)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
