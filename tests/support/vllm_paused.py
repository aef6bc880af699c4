"""A run of vLLM in a separate process, in which a request is left out of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_host.jobs import run_job
from vllm_runs import ENVIRONMENT, TIMEOUTS, engine_arguments, sampling_parameters, with_defaults

Answer = tuple[list[int], list[float]]


def run_paused(
    model: Path,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    speculative: dict[str, Any],
    **engine: Any,
) -> tuple[Answer, Answer, int]:
    """Serve a request twice beside another, the second time with a pause.

    The scheduler is paused after a step that has accepted drafts of the first request, as for
    `pause_generation(mode="keep")`. Then the other one is aborted, which takes a step without any
    request.

    Args:
        model: Folder of the target.
        prompts: The prompts of both requests.
        sampling: The keyword arguments for `vllm_runs.sampling_parameters`, logprobs among them.
        speculative: The engine's `speculative_config`.
        engine: Further arguments of the engine.

    Returns:
        The answers without a pause and with it, each with the logprobs of its tokens, and the
        number of drafts that were accepted in the step before the pause.
    """
    arguments = engine_arguments(model, **{"max_num_seqs": 2, "seed": 0, **engine})
    arguments["speculative_config"] = with_defaults(speculative)
    found: tuple[Answer, Answer, int]
    work = arguments, prompts, sampling
    found, _ = run_job("vllm", _serve, work, ENVIRONMENT, TIMEOUTS[False])
    return found


def _serve(
    arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]
) -> tuple[Answer, Answer, int]:
    from vllm import LLM
    from vllm.v1.core.sched.interface import PauseState

    engine = LLM(**arguments).llm_engine
    core = engine.engine_core.engine_core

    def start(first: str, second: str) -> None:
        for name, prompt in zip((first, second), prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling_parameters(sampling))

    def finish(name: str) -> Answer:
        answer: Answer = [], []
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == name:
                    own = output.outputs[0]
                    chosen = zip(own.token_ids, own.logprobs, strict=True)
                    answer = [*own.token_ids], [likely[token].logprob for token, likely in chosen]
        return answer

    start("alone", "beside it")
    expected = finish("alone")
    start("paused", "aborted")
    emitted, accepted = 0, 0
    # The first answer is copied, so that most drafts are accepted.
    while accepted < 2:
        for output in engine.step():
            if output.request_id.startswith("paused"):
                now = len(output.outputs[0].token_ids)
                emitted, accepted = now, now - emitted - 1
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.abort_request(["aborted"])
    engine.step()
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    return expected, finish("paused"), accepted
