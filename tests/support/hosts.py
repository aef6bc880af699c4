"""One interface to both engines, for tests of behaviour that is the same in both."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from v2_on_cpu import check_runner, for_runner


@dataclass
class Case:
    """Requests for one engine.

    Attributes:
        prompts: Token ids, one list per request.
        sampling: Keyword arguments of vLLM's `SamplingParams`, which are translated for SGLang:
            one set for all requests, or one per request.
        together: Whether to submit all requests at once instead of one after the other.
        reset: Whether to flush the prefix cache and forget everything learned before the case.
        rounds: How many times to submit the requests; the last answers count.
        after: A file for which to wait before the case, while no request is running.
        sglang: Further fields of `sglang_runs.Case`, for SGLang alone.
    """

    prompts: list[list[int]]
    sampling: dict[str, Any] | list[dict[str, Any]]
    together: bool = True
    reset: bool = False
    rounds: int = 1
    after: Path | None = None
    sglang: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """An engine's answers to a case.

    Attributes:
        tokens: The new token ids of each request.
        samples: The new token ids of each request's samples, of which `tokens` has the first.
        reasons: Why each sample of each request ended.
        logprobs: The best tokens' logprobs for each request and position, if requested.
        chosen: The chosen token's logprob for each request and position, if requested.
        prompt_logprobs: The same as `logprobs` for the prompts; vLLM alone.
        cached: Prompt tokens of each request that were found in the cache.
        preemptions: How many requests were preempted, or retracted, so far.
        pieces: The requests, by row, in the order in which pieces of their answers arrived, if they
            were streamed; SGLang alone.
        counters: The tree worker's counts over the case; empty without a method.
    """

    tokens: list[list[int]]
    samples: list[list[list[int]]] = field(default_factory=list)
    reasons: list[list[str | None]] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    chosen: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    cached: list[int | None] = field(default_factory=list)
    preemptions: int = 0
    pieces: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """One of the engines: "vllm" or "sglang".

    Attributes:
        name: The engine's name.
        runner: vLLM's model runner; "v2" runs with its kernels in Triton's interpreter.
    """

    name: str
    runner: str = "v1"

    def __str__(self) -> str:
        return self.name + (self.runner == "v2") * "-v2"

    @property
    def installed(self) -> bool:
        """Whether this environment has the engine."""
        return importlib.util.find_spec(self.name) is not None

    def run(
        self,
        model: Path,
        cases: list[Case],
        method: str | None = None,
        options: dict[str, Any] | None = None,
        draft_model: Path | None = None,
        *,
        running: int = 8,
        length: int = 1024,
        chunk: int | None = None,
        environment: dict[str, str] | None = None,
        planted_fault: str | None = None,
        vllm: dict[str, Any] | None = None,
        sglang: dict[str, Any] | None = None,
    ) -> tuple[list[Answer], str]:
        """Serve the cases one after another with one engine, in a process of its own.

        Args:
            model: The target's folder.
            cases: The cases to serve.
            method: "token-recycling", "rsd" or "lyanna"; None for plain decoding.
            options: The method's options.
            draft_model: The folder of RSD's draft model, or of Lyanna's drafter.
            running: Greatest number of requests that run at a time.
            length: Longest context.
            chunk: Greatest number of prompt tokens in a step; None for the engine's default.
            environment: Environment variables of the engine's process.
            planted_fault: A fault from `faults`.
            vllm: Arguments of vLLM's engine alone.
            sglang: Arguments of SGLang's engine alone.

        Returns:
            The answers, and the engine's log.

        Raises:
            RunFailed: The engine did not start, or stopped.
        """
        if self.name == "vllm":
            return self._vllm(
                *(model, cases, method, options, draft_model, running, length, chunk),
                environment=environment,
                planted_fault=planted_fault,
                **(vllm or {}),
            )
        return self._sglang(
            *(model, cases, method, options, draft_model, running, length, chunk),
            variables=environment,
            planted_fault=planted_fault,
            **(sglang or {}),
        )

    def _vllm(
        self,
        model: Path,
        cases: list[Case],
        method: str | None,
        options: dict[str, Any] | None,
        draft_model: Path | None,
        running: int,
        length: int,
        chunk: int | None,
        **engine: Any,
    ) -> tuple[list[Answer], str]:
        runs = importlib.import_module("vllm_runs")
        engine["environment"] = for_runner(self.runner) | (engine.get("environment") or {})
        speculative = None
        if method is not None:
            speculative = {"method": method.replace("-", "_"), **(options or {})}
            if draft_model is not None:
                speculative["model"] = str(draft_model)
        served, log = runs.run_vllm(
            model,
            [
                runs.Case(
                    each.prompts,
                    each.sampling,
                    reset=each.reset,
                    rounds=each.rounds,
                    together=each.together,
                    after=each.after,
                )
                for each in cases
            ],
            speculative=speculative,
            max_num_seqs=running,
            max_model_len=length,
            **{"max_num_batched_tokens": chunk or max(1024, length), **engine},
        )
        return [
            Answer(
                tokens=[samples[0] for samples in each.tokens],
                samples=each.tokens,
                reasons=each.reasons,
                logprobs=[samples[0] or [] for samples in each.logprobs],
                chosen=[
                    [best[token] for token, best in zip(tokens[0], bests[0], strict=True)]
                    if bests[0]
                    else []
                    for tokens, bests in zip(each.tokens, each.logprobs, strict=True)
                ],
                prompt_logprobs=[
                    [best or {} for best in positions or ()] for positions in each.prompt_logprobs
                ],
                cached=each.cached,
                preemptions=each.preemptions,
                counters=each.counters,
            )
            for each in served
        ], check_runner(self.runner, log)

    def _sglang(
        self,
        model: Path,
        cases: list[Case],
        method: str | None,
        options: dict[str, Any] | None,
        draft_model: Path | None,
        running: int,
        length: int,
        chunk: int | None,
        **engine: Any,
    ) -> tuple[list[Answer], str]:
        runs = importlib.import_module("sglang_runs")
        if chunk is not None:
            engine["chunked_prefill_size"] = chunk
        served, log = runs.run_sglang(
            model,
            [_for_sglang(runs, each) for each in cases],
            drafted=method is not None,
            options=options,
            draft_model=draft_model,
            max_running_requests=running,
            context_length=length,
            **({} if method is None else {"method": method}),
            **engine,
        )
        return [
            Answer(
                tokens=each.tokens,
                samples=[[tokens] for tokens in each.tokens],
                reasons=[[reason] for reason in each.reasons],
                logprobs=each.top_logprobs,
                chosen=each.logprobs,
                cached=each.cached,
                preemptions=sum(each.retractions),
                pieces=each.pieces,
                counters=each.counters,
            )
            for each in served
        ], log


VLLM, SGLANG = HOSTS = (Host("vllm"), Host("sglang"))
VLLM_V2 = Host("vllm", "v2")
"""Not one of `HOSTS`, as it serves tiny models alone in reasonable time."""

on_v2_too = pytest.mark.parametrize(
    "host", [*HOSTS, pytest.param(VLLM_V2, marks=pytest.mark.full)], indirect=True, ids=str
)
"""For tests that V2 runs too, as part of the full product."""

SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "extra_args": "custom_params",
}
"""Names of sampling parameters that differ between the engines: vLLM's, and SGLang's."""


def _for_sglang(runs: Any, case: Case) -> Any:
    settings = case.sampling if isinstance(case.sampling, list) else [case.sampling]
    logprobs = {each.get("logprobs") for each in settings}
    assert len(logprobs) == 1, "SGLang is asked for logprobs of all requests or of none"
    translated = [
        {
            SGLANG_NAMES.get(name, name): value
            for name, value in setting.items()
            if name != "logprobs"
        }
        for setting in settings
    ]
    for setting in translated:
        if bias := setting.get("logit_bias"):
            setting["logit_bias"] = {str(token): value for token, value in bias.items()}
    return runs.Case(
        case.prompts,
        translated if isinstance(case.sampling, list) else translated[0],
        together=case.together,
        logprobs=logprobs.pop(),
        reset=case.reset,
        rounds=case.rounds,
        after=case.after,
        **case.sglang,
    )
