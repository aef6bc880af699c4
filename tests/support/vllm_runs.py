"""Runs of the real vLLM, each in a separate process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
from awaited import wait_for
from engine_host.jobs import RunFailed, run_job
from tiny_images import random_image

__all__ = ["ENVIRONMENT", "Answer", "Case", "RunFailed", "run_vllm", "together"]


@dataclass
class Case:
    """Requests that are submitted together.

    Attributes:
        prompts: Token ids, one list per request.
        sampling: Keyword arguments of `SamplingParams`: one set for all requests, or one per
            request. `structured` has those of `StructuredOutputsParams`.
        reset: Whether to flush the prefix cache and forget everything learned before the case.
        reload: Whether to reload the weights before the case.
        sleep: The level at which the engine sleeps and wakes up before the case.
        rounds: How many times to submit the requests; the last answers count.
        after: A file for which to wait before the case, while no request is running.
        adapters: Name of each request's LoRA adapter, None for the model itself; empty for all.
        loads: Folders of LoRA adapters to load before the case, by name; None to unload one. It
            takes the place of one that was loaded for an earlier case under the same name.
        images: Seeds of a random image for each request, in whose prompt one token stands for it;
            None for requests without an image.
        together: Whether to submit all requests at once instead of one after the other.
    """

    prompts: list[list[int]]
    sampling: dict[str, Any] | list[dict[str, Any]]
    reset: bool = False
    reload: bool = False
    sleep: int | None = None
    rounds: int = 1
    after: Path | None = None
    adapters: list[str | None] = field(default_factory=list)
    loads: dict[str, str | None] = field(default_factory=dict)
    images: list[int | None] | None = None
    together: bool = True


@dataclass
class Answer:
    """The engine's answers to a case.

    Attributes:
        tokens: The new token ids of each request, one list per sample.
        logprobs: Logprobs by token id, for each request, sample and position.
        prompt_logprobs: Logprobs by token id, for each request and position of its prompt.
        reasons: Why each sample ended.
        cached: Prompt tokens of each request that were found in the cache.
        counters: The tree worker's counts over the case; empty without a method.
        explained: How the sizes of trees were chosen so far; empty without a method.
        choices: Why the last sizes were chosen, where the scheduler chooses them; else empty.
        preemptions: How often the scheduler has preempted a request so far.
        iterations: How many steps the engine has run so far.
        engine_counts: The engine's own counts of drafts so far, by the names of its metrics.
        accepted: How often drafts were accepted since the last reset; empty without a method.
    """

    tokens: list[list[list[int]]]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    reasons: list[list[str | None]]
    cached: list[int | None]
    counters: dict[str, int] = field(default_factory=dict)
    explained: list[dict[str, Any]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    preemptions: int = 0
    iterations: int = 0
    engine_counts: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, Any] = field(default_factory=dict)

    @property
    def hits(self) -> dict[str, int]:
        """Accepted draft tokens by source."""
        return {row["source"]: row["hit"] for row in self.accepted["sources"]}


def together(answers: list[Answer]) -> Any:
    """What has the counts of all cases, for `proves_drafting` where not every case needs trees."""
    return SimpleNamespace(counters=sum((Counter(each.counters) for each in answers), Counter()))


DRAFTS = "vllm:spec_decode_num_"
"""What the names of the engine's counts of drafts begin with."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}


TIMEOUTS = {False: 400.0, True: 3000.0}
"""Seconds for a run, by whether kernels run in Triton's interpreter, whose programs take about a
millisecond each."""


def with_defaults(speculative: dict[str, Any]) -> dict[str, Any]:
    """By default draft 80 nodes, as `auto` would choose plain decoding for a small model."""
    if speculative["method"] != "token_recycling":
        return speculative
    is_sized = {"nodes", "tree"} & speculative.keys()
    return {"prime": False, **({} if is_sized else {"nodes": 80}), **speculative}


def engine_arguments(model: Path, **given: Any) -> dict[str, Any]:
    """The arguments of an eager engine in float32 that reads and gives token ids."""
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        **given,
    }


def run_vllm(
    model: Path,
    cases: list[Case],
    speculative: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    timeout: float | None = None,
    planted_fault: str | None = None,
    **engine: Any,
) -> tuple[list[Answer], str]:
    """Serve the cases one after another with one engine.

    A `planted_fault` is one of `faults`. The run may take `timeout` seconds, as a rule one of
    `TIMEOUTS`.

    Returns:
        The answers, and the engine's log.

    Raises:
        RunFailed: The engine did not start, or stopped.
    """
    given = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "seed": 0,
        "disable_log_stats": False,
        **engine,
    }
    arguments = engine_arguments(model, **given)
    if speculative is not None:
        arguments["speculative_config"] = with_defaults(speculative)
    fault = {faults.VARIABLE: planted_fault} if planted_fault else {}
    variables = ENVIRONMENT | fault | (environment or {})
    seconds = timeout or TIMEOUTS["TRITON_INTERPRET" in variables]
    answers: list[Answer]
    answers, log = run_job("vllm", _serve, (arguments, cases), variables, seconds)
    return answers, log


def _serve(arguments: dict[str, Any], cases: list[Case]) -> list[Answer]:
    from vllm import LLM

    llm = LLM(**arguments)
    ours = "speculative_config" in arguments and (
        arguments["speculative_config"]["method"] != "ngram"
    )
    answers = []
    adapters = Adapters(llm)
    for case in cases:
        wait_for(case.after)
        if case.reset:
            assert llm.reset_prefix_cache()
            if ours:
                llm.collective_rpc("drafttree_reset")
        if case.sleep is not None:
            llm.sleep(case.sleep)
            llm.wake_up()
        if case.reload:
            llm.collective_rpc("reload_weights")
        before = counts(llm) if ours else {}
        many = isinstance(case.sampling, list)
        settings = case.sampling if many else [case.sampling] * len(case.prompts)
        parameters = [sampling_parameters(setting) for setting in settings]
        prompts = _prompts(case)
        adapters.load(case.loads)
        adapted = adapters.of(case)
        for _ in range(case.rounds):
            outputs = []
            for group in _groups(case):
                outputs += llm.generate(
                    prompts[group],
                    parameters[group],
                    use_tqdm=False,
                    lora_request=adapted and adapted[group],
                )
        after = counts(llm) if ours else {}
        answers.append(
            Answer(
                tokens=[[list(each.token_ids) for each in one.outputs] for one in outputs],
                logprobs=[[_plain(each.logprobs) for each in one.outputs] for one in outputs],
                prompt_logprobs=[_plain(one.prompt_logprobs) for one in outputs],
                cached=[one.num_cached_tokens for one in outputs],
                reasons=[[each.finish_reason for each in one.outputs] for one in outputs],
                counters={name: after[name] - before[name] for name in after},
                explained=llm.collective_rpc("drafttree_explain")[0] if ours else [],
                accepted=llm.collective_rpc("drafttree_acceptance")[0] if ours else {},
                choices=llm.collective_rpc("drafttree_choices")[0] if ours else [],
                preemptions=metric(llm, "vllm:num_preemptions").value,
                iterations=metric(llm, "vllm:iteration_tokens_total").count,
                engine_counts={
                    each.name: each.value
                    for each in llm.get_metrics()
                    if each.name.startswith(DRAFTS) and hasattr(each, "value")
                },
            )
        )
    return answers


def counts(llm: Any) -> dict[str, int]:
    """The tree worker's counts, which must be the same on all tensor-parallel ranks."""
    first, *others = llm.collective_rpc("drafttree_counters")
    assert all(each == first for each in others), (first, others)
    counted: dict[str, int] = first
    return counted


def metric(llm: Any, name: str) -> Any:
    """One of the engine's metrics."""
    return next(each for each in llm.get_metrics() if each.name == name)


def _prompts(case: Case) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in case.prompts]
    for prompt, seed in zip(prompts, case.images or [], strict=False):
        if seed is not None:
            prompt["multi_modal_data"] = {"image": random_image(seed)}
    return prompts


def _groups(case: Case) -> list[slice]:
    if case.together:
        return [slice(None)]
    return [slice(row, row + 1) for row in range(len(case.prompts))]


class Adapters:
    """The LoRA adapters of an engine, which are loaded as by vLLM's server."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._numbers = count(1)
        self._loaded: dict[str, Any] = {}

    def load(self, asked: dict[str, str | None]) -> None:
        """Load, replace and unload adapters. A new one is loaded by the first request for it."""
        for name, folder in asked.items():
            known = self._loaded.pop(name, None)
            if folder is None:
                assert self._engine.remove_lora(known.lora_int_id)
                continue
            number = known.lora_int_id if known else next(self._numbers)
            if known:
                assert self._engine.add_lora(_adapter(name, number, folder, load_inplace=True))
            self._loaded[name] = _adapter(name, number, folder)

    def of(self, case: Case) -> list[Any] | None:
        """The adapter of each request; None if no request has one."""
        return [name and self._loaded[name] for name in case.adapters] or None


def _adapter(*args: Any, **kwargs: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(*args, **kwargs)


def sampling_parameters(setting: dict[str, Any]) -> Any:
    """The engine's `SamplingParams`; `structured` has those of `StructuredOutputsParams`."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    setting = {"detokenize": False} | setting
    if structured := setting.pop("structured", None):
        setting["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**setting)


def _plain(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        None if position is None else {token: each.logprob for token, each in position.items()}
        for position in logprobs
    ]
