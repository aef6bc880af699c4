"""Greedy answers of the bench's vLLM engine, with either model runner, one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_host.jobs import run_job
from v2_on_cpu import for_runner
from vllm_runs import ENVIRONMENT


@dataclass
class Answered:
    """The answers of an engine.

    Attributes:
        tokens: The new token ids of each prompt.
        ends: How many there were after each step that emitted any, the prompt's own first.
        counters: The method's own counts over all prompts; empty without a method.
    """

    tokens: list[list[int]]
    ends: list[list[int]]
    counters: dict[str, int]


def bench_answers(
    model: Path,
    prompts: list[list[int]],
    max_tokens: int,
    runner: str,
    options: dict[str, Any] | None = None,
    timeout: float = 400,
) -> Answered:
    """Answer prompts in float32.

    Args:
        model: The target's folder.
        prompts: Token ids of each prompt.
        max_tokens: Greatest number of tokens of each answer.
        runner: "v1" or "v2".
        options: The engine's speculative configuration; None for plain decoding.
        timeout: Seconds that the run may take.

    Raises:
        RunFailed: The engine did not start, or stopped.
    """
    environment = ENVIRONMENT | for_runner(runner)
    arguments = (str(model), prompts, max_tokens, runner, options)
    answer: Answered
    answer, _ = run_job("vllm", _answer, arguments, environment, timeout)
    return answer


def _answer(
    model: str,
    prompts: list[list[int]],
    max_tokens: int,
    runner: str,
    options: dict[str, Any] | None,
) -> Answered:
    from vllm import SamplingParams

    from drafttree.bench.protocol import EngineSpec
    from drafttree.bench.vllm_engine import VllmEngine

    longest = max_tokens + max(map(len, prompts))
    spec = EngineSpec(model, max_model_len=longest, eager=True, speculative_config=options)
    bench = VllmEngine(spec)
    assert bench.info.runner == runner
    engine = bench._llm.llm_engine
    answered = Answered([], [], {})
    for name, prompt in enumerate(prompts):
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
        engine.add_request(str(name), {"prompt_token_ids": prompt}, parameters)
        ends, tokens = [0], list[int]()
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = [*output.outputs[0].token_ids]
                if len(tokens) > ends[-1]:
                    ends.append(len(tokens))
        answered.tokens.append(tokens)
        answered.ends.append(ends[1:])
    if options is not None:
        answered.counters = bench.counters(None)
    return answered
