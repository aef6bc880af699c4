"""A run of vLLM in a separate process, in which a request is left out of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_host.jobs import run_job
from vllm_runs import ENVIRONMENT, TIMEOUTS, engine_arguments, sampling_parameters, with_defaults

Answer = tuple[list[int], list[float]]

_TOKENS = 6
"""Tokens after which the other request is aborted."""


def run_paused(
    model: Path,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    speculative: dict[str, Any],
    **engine: Any,
) -> tuple[Answer, Answer, int]:
    """Serve a request three times beside another one, which is aborted, the last time in a pause.

    The scheduler is paused as for `pause_generation(mode="keep")`. To abort the other request then
    takes a step without any request.

    Args:
        model: Folder of the target.
        prompts: The prompts of both requests.
        sampling: The keyword arguments for `vllm_runs.sampling_parameters`, logprobs among them.
        speculative: The engine's `speculative_config`.
        engine: Further arguments of the engine.

    Returns:
        The second and the third answer, each with the logprobs of its tokens, and the number of
        drafts that were accepted in the step before the pause.
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

    def serve(name: str, *, pause: bool) -> tuple[Answer, int]:
        names = name, f"beside {name}"
        for each, prompt in zip(names, prompts, strict=True):
            engine.add_request(each, {"prompt_token_ids": prompt}, sampling_parameters(sampling))
        answer: Answer = [], []
        accepted, before = 0, None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == name:
                    own = output.outputs[0]
                    accepted = len(own.token_ids) - len(answer[0]) - 1
                    chosen = zip(own.token_ids, own.logprobs, strict=True)
                    answer = [*own.token_ids], [likely[token].logprob for token, likely in chosen]
            if before is not None or len(answer[0]) < _TOKENS:
                continue
            before = accepted
            if pause:
                core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            engine.abort_request([names[1]])
            if pause:
                engine.step()
                core.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert before is not None
        return answer, before

    # The later answers are copies of the first one, so that most drafts are accepted.
    serve("first", pause=False)
    expected, _ = serve("second", pause=False)
    found, accepted = serve("third", pause=True)
    return expected, found, accepted
