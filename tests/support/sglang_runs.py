"""Runs of the real SGLang, each in a separate process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
import overlap_on_cpu
from awaited import wait_for
from engine_host.jobs import RunFailed, run_job
from tiny_images import random_image

__all__ = ["Answer", "Case", "RunFailed", "environment", "run_sglang"]


@dataclass
class Case:
    """Requests for one engine.

    Attributes:
        prompts: Token ids, one list per request.
        sampling: The engine's sampling parameters: one set for all requests, or one per request.
        together: Whether to submit all requests at once instead of one after the other.
        logprobs: Number of best tokens to report beside the chosen one; None for no logprobs.
        scored: Whether to report the logprobs of the prompts' tokens too, with `logprobs`.
        reset: Whether to flush the engine's cache, and so forget everything learned, before the
            case.
        rounds: How many times to submit the requests; the last answers count.
        after: A file for which to wait before the case, while no request is running.
        processor: Name of a custom logit processor in `sglang_processors`.
        adapters: Name of each request's LoRA adapter, None for the model itself; empty for all. It
            is not for requests that are streamed.
        loads: Folders of LoRA adapters to load before the case, by name. One that was loaded for
            an earlier case under the same name is unloaded first.
        stream: Whether to stream the answers and record the order of their pieces.
        abort_after: Number of tokens after which to abort a request, by row; implies `stream`.
        images: Seeds of each request's random images, for each of which the prompt has what stands
            for an image; empty for all. It is not for requests that are streamed.
    """

    prompts: list[list[int]]
    sampling: dict[str, Any] | list[dict[str, Any]]
    together: bool = True
    logprobs: int | None = None
    scored: bool = False
    reset: bool = False
    rounds: int = 1
    after: Path | None = None
    processor: str | None = None
    adapters: list[str | None] = field(default_factory=list)
    loads: dict[str, str] = field(default_factory=dict)
    stream: bool = False
    abort_after: dict[int, int] = field(default_factory=dict)
    images: list[list[int]] = field(default_factory=list)
    session: bool = False
    weights: Path | None = None
    embeds: Path | None = None


@dataclass
class Answer:
    """The engine's answers to a case.

    Attributes:
        tokens: The new token ids of each request.
        texts: The new text of each request; None if the engine has no tokenizer.
        logprobs: The chosen token's logprob for each request and position.
        top_logprobs: The best tokens' logprobs by token id, for each request and position.
        scores: The logprobs of the prompts' tokens, but the first, for each request.
        reasons: Why each request ended.
        cached: Prompt tokens of each request that were found in the cache.
        retractions: How often each request was retracted.
        pieces: The row of the request of each streamed piece, in order; empty if not streamed.
        counters: The tree workers' counts over the case, of all replicas; empty without a method.
    """

    tokens: list[list[int]]
    texts: list[str | None]
    logprobs: list[list[float]]
    top_logprobs: list[list[dict[int, float]]]
    scores: list[list[float]]
    reasons: list[str | None]
    cached: list[int]
    retractions: list[int]
    pieces: list[int]
    counters: dict[str, int]


def environment() -> dict[str, str]:
    """Environment variables for SGLang on a CPU, with one thread because idle threads spin."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


LIMITS = {
    "dtype": "float32",
    "max_total_tokens": 8192,
    "context_length": 1024,
    "max_running_requests": 8,
    "skip_server_warmup": True,
    "random_seed": 0,
}


def run_sglang(
    model: Path,
    cases: list[Case],
    options: dict[str, Any] | None = None,
    drafted: bool = True,
    method: str = "token-recycling",
    draft_model: Path | None = None,
    timeout: float = 400,
    planted_fault: str | None = None,
    variables: dict[str, str] | None = None,
    **engine: Any,
) -> tuple[list[Answer], str]:
    """Serve the cases one after another with one engine.

    Args:
        model: Folder of the target.
        cases: The cases to serve.
        options: The method's options. By default Token Recycling is not primed and drafts 80 nodes,
            because `auto` would choose plain decoding for a small model.
        drafted: Whether to use the method; False for plain SGLang.
        method: The method's name, as users give it.
        draft_model: Folder of RSD's draft model or of Lyanna's drafter.
        timeout: Seconds after which the run is stopped.
        planted_fault: A fault from `faults`.
        variables: Further environment variables of the engine.
        engine: Further server arguments. Overlapping scheduling, which methods turn off on a CPU,
            is kept on if `disable_overlap_schedule` is False.

    Returns:
        The answers, and the engine's log.

    Raises:
        RunFailed: The engine did not start, or stopped.
    """
    arguments = {"model_path": str(model), "skip_tokenizer_init": True, **LIMITS, **engine}
    arguments.setdefault("log_level", "info")
    if method == "token-recycling":
        options = options or {}
        is_sized = {"nodes", "tree"} & options.keys()
        options = {"prime": False, **({} if is_sized else {"nodes": 80}), **options}
    if drafted:
        arguments["speculative_algorithm"] = method
        if draft_model is not None:
            arguments["speculative_draft_model_path"] = str(draft_model)
    overlap = (
        {overlap_on_cpu.VARIABLE: "1"} if engine.get("disable_overlap_schedule") is False else {}
    )
    fault = {faults.VARIABLE: planted_fault} if planted_fault else {}
    answers: list[Answer]
    answers, log = run_job(
        "sglang",
        _serve,
        (arguments, options or {}, cases),
        environment() | fault | overlap | (variables or {}),
        timeout,
    )
    return answers, log


def _serve(arguments: dict[str, Any], options: dict[str, Any], cases: list[Case]) -> list[Answer]:
    import sglang

    from drafttree.sglang.options import set_options

    set_options(**options)
    engine = sglang.Engine(**arguments)
    loaded: set[str] = set()
    try:
        answers = []
        for case in cases:
            _load(engine, case.loads, loaded)
            if case.weights is not None:
                updated, message, *_ = engine.update_weights_from_disk(str(case.weights))
                assert updated, message
            answers.append(_answer(engine, case))
        if isinstance(options.get("hot_start"), str):
            time.sleep(4)  # tables are saved when idle, and the engine kills its processes
        return answers
    finally:
        engine.shutdown()


def _load(engine: Any, asked: dict[str, str], loaded: set[str]) -> None:
    for name, folder in asked.items():
        if name in loaded:
            result = engine.unload_lora_adapter(name)
            assert result.success, result.error_message
        result = engine.load_lora_adapter(name, folder)
        assert result.success, result.error_message
        loaded.add(name)


def _answer(engine: Any, case: Case) -> Answer:
    wait_for(case.after)
    if case.reset:
        engine.flush_cache()
    before = counters_of(engine)
    for _ in range(case.rounds):
        pieces: list[int] = []
        outputs = _generate(engine, case, pieces)
    after = counters_of(engine)
    infos = [output["meta_info"] for output in outputs]
    return Answer(
        tokens=[list(output["output_ids"]) for output in outputs],
        texts=[output.get("text") for output in outputs],
        logprobs=[[each[0] for each in info.get("output_token_logprobs", ())] for info in infos],
        top_logprobs=[
            [{token: logprob for logprob, token, *_ in best or ()} for best in positions]
            for positions in (info.get("output_top_logprobs") or () for info in infos)
        ],
        scores=[
            [logprob for logprob, *_ in info.get("input_token_logprobs", ())][1:] for info in infos
        ],
        reasons=[(info["finish_reason"] or {}).get("type") for info in infos],
        cached=[info.get("cached_tokens", 0) for info in infos],
        retractions=[info.get("num_retractions", 0) for info in infos],
        pieces=pieces,
        counters={name: after[name] - before[name] for name in after},
    )


def _generate(engine: Any, case: Case, pieces: list[int]) -> list[dict[str, Any]]:
    many = isinstance(case.sampling, list)
    settings = case.sampling if many else [case.sampling] * len(case.prompts)
    extra: dict[str, Any] = {}
    if case.logprobs is not None:
        extra = {"return_logprob": True, "top_logprobs_num": case.logprobs}
        if case.scored:
            extra["logprob_start_len"] = 0
    if case.processor is not None:
        import sglang_processors

        extra["custom_logit_processor"] = getattr(sglang_processors, case.processor).to_str()
    if case.stream or case.abort_after:
        return engine.loop.run_until_complete(_stream(engine, case, settings, pieces))
    if case.session:
        session = engine.open_session(capacity_of_str_len=1 << 20, streaming=True)
        extra["session_params"] = {"id": session}
    together = case.together and not case.session
    groups = [slice(None)] if together else [slice(i, i + 1) for i in range(len(settings))]
    outputs: list[dict[str, Any]] = []
    for group in groups:
        if case.adapters:
            extra["lora_path"] = case.adapters[group]
        if case.images:
            extra["image_data"] = [[*map(random_image, seeds)] for seeds in case.images[group]]
        if case.embeds is not None:
            outputs += _from_embeddings(engine, case.embeds, case.prompts[group], settings[group])
            continue
        outputs += engine.generate(
            input_ids=case.prompts[group], sampling_params=settings[group], **extra
        )
    if case.session:
        engine.close_session(session)
    return outputs


def _from_embeddings(
    engine: Any, model: Path, prompts: list[list[int]], settings: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    from safetensors.torch import load_file
    from sglang.srt.managers.io_struct import GenerateReqInput

    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    request = GenerateReqInput(
        input_embeds=[table[prompt].tolist() for prompt in prompts], sampling_params=settings
    )
    answers = engine.tokenizer_manager.generate_request(request, None)
    outputs: list[dict[str, Any]] = engine.loop.run_until_complete(anext(answers))
    return outputs


async def _stream(
    engine: Any, case: Case, settings: list[dict[str, Any]], pieces: list[int]
) -> list[dict[str, Any]]:
    import asyncio

    async def one(row: int) -> dict[str, Any]:
        # An abort ends all requests whose names begin with the given one.
        name = f"request {row:04}"
        stream = await engine.async_generate(
            input_ids=case.prompts[row], sampling_params=settings[row], stream=True, rid=name
        )
        output: dict[str, Any] = {}
        async for piece in stream:
            pieces.append(row)
            # The last piece of an aborted request may lack its tokens.
            output = {
                **output,
                **piece,
                "output_ids": piece.get("output_ids") or output["output_ids"],
            }
            if len(output["output_ids"]) >= case.abort_after.get(row, 1 << 30):
                engine.tokenizer_manager.abort_request(name)
        return output

    return list(await asyncio.gather(*map(one, range(len(settings)))))


def counters_of(engine: Any) -> dict[str, int]:
    """The tree workers' counts since the engine's start, of all replicas."""
    counters: dict[str, int] = {}
    for replica in engine.get_server_info()["internal_states"]:
        for name, count in replica.get("drafttree", {}).items():
            counters[name] = counters.get(name, 0) + count
    return counters
