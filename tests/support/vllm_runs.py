"""Runs of the real vLLM, each in a process of its own, so that engines never meet."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import drawing_ahead
import lyanna_states
import no_waiting
import triton_on_cpu
from rsd_fault import leave_the_residual


@dataclass
class Case:
    """Requests that are submitted together.

    Attributes:
        prompts: token ids, one list a request.
        sampling: keyword arguments of `SamplingParams`: one for all, or one a request.
        reset: forget what was learnt before the case.
        reload: load the weights anew before the case.
        rounds: submit the requests so many times; the last answers count.
        adapter: a LoRA adapter's folder, asked for by every second request.
    """

    prompts: list[list[int]]
    sampling: dict[str, Any] | list[dict[str, Any]]
    reset: bool = False
    reload: bool = False
    rounds: int = 1
    adapter: str | None = None


@dataclass
class Answer:
    """What the engine made of a case.

    Attributes:
        tokens: the new token ids, for each request one list a sample.
        logprobs: for each request, sample and position, the logprob by token id.
        prompt_logprobs: for each request and position, the same.
        reasons: why each sample ended.
        cached: prompt tokens that were found in the cache.
        counters: our worker's counts over the case; empty without one.
        preemptions: how often the scheduler preempted a request so far.
    """

    tokens: list[list[list[int]]]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    reasons: list[list[str | None]]
    cached: list[int | None]
    counters: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0


class RunFailed(Exception):
    """The engine's process failed; the message holds the end of its output."""


ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}


def with_defaults(speculative: dict[str, Any]) -> dict[str, Any]:
    """Token Recycling as tests want it: as many nodes as pay would be none for a small model."""
    if speculative["method"] != "token_recycling":
        return speculative
    sized = {"nodes", "tree"} & speculative.keys()
    return {"prime": False, **({} if sized else {"nodes": 80}), **speculative}


def run_vllm(
    model: Path,
    cases: list[Case],
    speculative: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    timeout: float = 400,
    planted_fault: Literal["most likely", "residual"] | None = None,
    **engine: Any,
) -> tuple[list[Answer], str]:
    """Serve the cases one after another with one engine.

    With a `planted_fault`, below the root the most likely token is taken where one is to be drawn;
    or RSD does not subtract the residual.

    Returns:
        The answers, and the engine's log.

    Raises:
        RunFailed: the engine did not start or stopped.
    """
    arguments = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "skip_tokenizer_init": True,
        "seed": 0,
        "disable_log_stats": False,
        **engine,
    }
    if speculative is not None:
        arguments["speculative_config"] = with_defaults(speculative)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.pickle"
        result = Path(folder) / "result.pickle"
        job.write_bytes(pickle.dumps((arguments, cases, planted_fault)))
        process = subprocess.run(
            [sys.executable, __file__, str(job), str(result)],
            env=os.environ | ENVIRONMENT | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if process.returncode != 0:
            raise RunFailed(process.stdout[-3000:])
        answers: list[Answer] = pickle.loads(result.read_bytes())
    return answers, process.stdout


def _serve(arguments: dict[str, Any], cases: list[Case]) -> list[Answer]:
    from vllm import LLM

    llm = LLM(**arguments)
    ours = "speculative_config" in arguments and (
        arguments["speculative_config"]["method"] != "ngram"
    )
    answers = []
    for case in cases:
        if ours and case.reset:
            llm.collective_rpc("drafttree_reset")
        if case.reload:
            llm.collective_rpc("reload_weights")
        before = llm.collective_rpc("drafttree_counters")[0] if ours else {}
        many = isinstance(case.sampling, list)
        settings = case.sampling if many else [case.sampling] * len(case.prompts)
        parameters = [_parameters(setting) for setting in settings]
        prompts = [{"prompt_token_ids": prompt} for prompt in case.prompts]
        for _ in range(case.rounds):
            outputs = llm.generate(
                prompts, parameters, use_tqdm=False, lora_request=_adapters(case)
            )
        after = llm.collective_rpc("drafttree_counters")[0] if ours else {}
        answers.append(
            Answer(
                tokens=[[list(each.token_ids) for each in one.outputs] for one in outputs],
                logprobs=[[_plain(each.logprobs) for each in one.outputs] for one in outputs],
                prompt_logprobs=[_plain(one.prompt_logprobs) for one in outputs],
                cached=[one.num_cached_tokens for one in outputs],
                reasons=[[each.finish_reason for each in one.outputs] for one in outputs],
                counters={name: after[name] - before[name] for name in after},
                preemptions=next(
                    metric.value
                    for metric in llm.get_metrics()
                    if metric.name == "vllm:num_preemptions"
                ),
            )
        )
    return answers


def _plant_most_likely() -> None:
    from drafttree.vllm import sampling

    draw = sampling._Draw.__call__

    def faulty(self: Any, node: Any, alive: Any) -> Any:
        drawn = draw(self, node, alive)
        if self.levels == 1:
            return drawn
        most_likely = self._logits[self._starts + node].argmax(-1).int()
        self._last = most_likely.tolist()
        return most_likely

    sampling._Draw.__call__ = faulty  # type: ignore[method-assign]


def _adapters(case: Case) -> list[Any] | None:
    if case.adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, case.adapter)
    return [adapter if row % 2 else None for row in range(len(case.prompts))]


def _parameters(setting: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    setting = {"detokenize": False} | setting
    if choice := setting.pop("choice", None):
        setting["structured_outputs"] = StructuredOutputsParams(choice=choice)
    return SamplingParams(**setting)


def _plain(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [
        None if position is None else {token: each.logprob for token, each in position.items()}
        for position in logprobs
    ]


if __name__ == "__main__":
    # The engine may start processes of its own that import this file again.
    sys.modules.setdefault("vllm_runs", sys.modules["__main__"])
    Case.__module__ = Answer.__module__ = "vllm_runs"
    given, wanted, faulty = pickle.loads(Path(sys.argv[1]).read_bytes())
    if file := os.environ.get(lyanna_states.VARIABLE):
        lyanna_states.keep_logits(file)
    if os.environ.get(triton_on_cpu.VARIABLE):
        triton_on_cpu.serve_so()
    if os.environ.get(drawing_ahead.VARIABLE):
        from drafttree.vllm import sampling as seam

        drawing_ahead.draw_so(seam)
    if os.environ.get(no_waiting.VARIABLE):
        no_waiting.forbid_waiting()
    if faulty == "residual":
        leave_the_residual()
    elif faulty:
        _plant_most_likely()
    made = _serve(given, wanted)
    Path(sys.argv[2]).write_bytes(pickle.dumps(made))
    print(json.dumps({"served": len(made)}))
