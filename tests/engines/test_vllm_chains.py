"""vLLM where trees cannot be verified: chains on its own attention and state handling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_prompts import some_prompts
from tiny_families import WITHOUT_TREES, make_tiny_family
from vllm_runs import Answer, Case, run_vllm

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.5, "max_tokens": 32, "ignore_eos": True}
MIXED = [
    GREEDY,
    SEEDED | {"seed": 3, "logprobs": 2},
    SEEDED | {"seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    SEEDED | {"seed": 5, "top_k": 5, "min_p": 0.02},
    GREEDY | {"extra_args": {"drafttree": False}},
    GREEDY | {"max_tokens": 3},
]

CHAINS = {"method": "token_recycling"}
ANNOUNCED = "Token Recycling drafts chains of up to"

ENGINE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    # The engine's CPU kernels for its linear attention need bfloat16, and verification is refused
    # with prefix caching there.
    "qwen3_next": {"dtype": "bfloat16", "enable_prefix_caching": False},
}
LONGEST = {"deepseek_v2": 31, "qwen3_next": 7}


@pytest.fixture(scope="session")
def without_trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of one of the families, which is made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_family(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def proves_chains(answer: Answer, longest: int) -> None:
    """Check that drafts were accepted, several at once, and that nothing but chains was verified.

    Fewer steps than accepted tokens and steps together mean that drafts were not only accepted, but
    emitted.
    """
    counters = answer.counters
    assert counters["accepted_tokens"] > counters["drafted_steps"] / 4 > 0
    assert counters["emitted"] == counters["steps"] + counters["accepted_tokens"]
    assert counters["draft_tokens"] <= longest * counters["drafted_steps"]
    assert counters["draft_tokens"] > 2 * counters["drafted_steps"]
    assert counters["non_first_child_accepted"] == counters["kv_rows_moved"] == 0


@pytest.mark.parametrize("family", WITHOUT_TREES)
def test_tokens_are_those_of_plain_decoding(
    family: str, without_trees: Callable[[str], Path]
) -> None:
    """Many requests at once, one after another, seeded, and with parameters that follow the text.

    With the last prompts again, nearly everything is copied, so the longest chains are accepted.
    """
    prompts = some_prompts(8, seed=5)
    seeded = [SEEDED | {"seed": seed} for seed in range(8)]
    cases = [
        Case(some_prompts(8), GREEDY),
        Case(some_prompts(4, seed=4), GREEDY, together=False),
        Case(prompts, seeded),
        Case(prompts, seeded),
        Case(some_prompts(6, seed=6), MIXED),
    ]
    model = without_trees(family)
    plain, _ = run_vllm(model, cases, **ENGINE[family])
    drafted, log = run_vllm(model, cases, CHAINS, **ENGINE[family])
    for without, with_chains in zip(plain, drafted, strict=True):
        assert with_chains.tokens == without.tokens
        proves_chains(with_chains, LONGEST[family])
    copied = drafted[3].counters
    assert copied["draft_tokens"] > LONGEST[family] / 2 * copied["drafted_steps"]
    assert copied["accepted_tokens"] > 0.9 * copied["draft_tokens"]
    assert log.count(f"{ANNOUNCED} {LONGEST[family]} tokens and no trees, because the model") == 1
