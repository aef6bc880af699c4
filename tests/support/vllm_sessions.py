"""A run of vLLM in a separate process that serves sessions: prompts come one after another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_host.jobs import run_job
from v2_on_cpu import check_runner, for_runner
from vllm_runs import (
    ENVIRONMENT,
    TIMEOUTS,
    counts,
    engine_arguments,
    sampling_parameters,
    with_defaults,
)

Turn = tuple[list[int], dict[str, Any]]
"""A prompt, and the keyword arguments for `vllm_runs.sampling_parameters`."""


@dataclass
class Sessions:
    """The answers to sessions.

    Attributes:
        tokens: The new token ids of each turn of each session.
        counters: The tree worker's counts; empty without a method.
    """

    tokens: list[list[list[int]]]
    counters: dict[str, int]


def run_sessions(
    model: Path,
    sessions: list[list[Turn]],
    speculative: dict[str, Any] | None = None,
    runner: str = "v1",
    environment: dict[str, str] | None = None,
    **engine: Any,
) -> Sessions:
    """Serve sessions one after another; a prompt is sent when the answer before it has ended.

    Args:
        model: Folder of the target.
        sessions: The turns of each session.
        speculative: The engine's `speculative_config`; None for plain decoding.
        runner: vLLM's model runner, "v1" or "v2".
        environment: Environment variables of the engine's process.
        engine: Further arguments of the engine.

    Raises:
        RunFailed: The engine did not start, or stopped.
    """
    arguments = engine_arguments(model, **{"max_num_seqs": 2, "seed": 0, **engine})
    if speculative is not None:
        arguments["speculative_config"] = with_defaults(speculative)
    seconds = TIMEOUTS[runner == "v2"]
    found: Sessions
    variables = ENVIRONMENT | for_runner(runner) | (environment or {})
    found, log = run_job("vllm", _serve, (arguments, sessions), variables, seconds)
    check_runner(runner, log)
    return found


def _serve(arguments: dict[str, Any], sessions: list[list[Turn]]) -> Sessions:
    from vllm import LLM

    llm = LLM(**arguments)
    tokens = []
    for number, turns in enumerate(sessions):
        name = f"session {number}"
        tokens.append([_answer(llm, name, *turn) for turn in turns])
        llm.llm_engine.engine_core.abort_requests([name])
    return Sessions(tokens, counts(llm) if "speculative_config" in arguments else {})


def _answer(llm: Any, name: str, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    """Send a turn to the engine core, which alone knows of sessions, and await the answer."""
    from vllm.v1.engine import EngineCoreRequest, FinishReason

    core = llm.llm_engine.engine_core
    parameters = sampling_parameters(sampling)
    if parameters.structured_outputs is not None:
        # As the part of the engine before the core chooses it.
        parameters.structured_outputs._backend = "xgrammar"
    core.add_request(
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=True,
        )
    )
    tokens: list[int] = []
    stops = sampling.get("stop_token_ids", [])
    while len(tokens) < sampling["max_tokens"] and not (tokens and tokens[-1] in stops):
        for output in core.get_output().outputs:
            tokens += output.new_token_ids
            assert output.finish_reason != FinishReason.ERROR, tokens
    return tokens
