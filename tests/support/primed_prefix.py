"""Priming between two requests with the same prompt, in an engine that is driven step by step."""

from __future__ import annotations

from typing import Any

from engine_host.jobs import run_job
from sglang_runs import environment
from vllm_runs import ENVIRONMENT


def answers_around_priming(
    engine: str, model: str, prompts: list[list[int]], folder: str, tokens: int
) -> tuple[list[list[list[int]]], list[tuple[int, int]]]:
    """Answer prompts, prime to the end, and answer them again from cached prefixes.

    Args:
        engine: "vllm" or "sglang".
        model: The target's folder.
        prompts: Token ids of each prompt.
        folder: The folder of the cache of primed rows.
        tokens: Tokens of each answer.

    Returns:
        The answers of both rounds, and the progress after each forward.
    """
    variables = ENVIRONMENT if engine == "vllm" else environment()
    answer: tuple[list[list[list[int]]], list[tuple[int, int]]]
    answer, _ = run_job(
        engine,
        _answer,
        (engine, model, prompts, tokens),
        variables | {"DRAFTTREE_CACHE": folder},
        400,
    )
    return answer


def _answer(engine: str, model: str, prompts: list[list[int]], tokens: int) -> Any:
    from drafttree.bench.protocol import EngineSpec, Request
    from drafttree.bench.sglang_engine import SglangEngine
    from drafttree.bench.vllm_engine import VllmEngine

    options = {"method": "token_recycling", "nodes": 15, "prime_seconds": 0}
    spec = EngineSpec(
        model, max_model_len=1024, eager=True, speculative_config=options, tokenizer=False
    )
    host: Any = VllmEngine(spec) if engine == "vllm" else SglangEngine(spec)

    def answers() -> list[list[int]]:
        return [host.generate([Request(prompt, tokens)])[0].token_ids for prompt in prompts]

    first = answers()
    progress = [host.prime(None)]
    while progress[-1][0] < progress[-1][1]:
        progress.append(host.prime(None))
    return [first, answers()], progress
