"""SGLang in the bench: a scheduler in this process, driven step by step through a pipe.

Because the bench steps the scheduler itself, it can time every engine step and count decode steps
from the engine's own requests, in the same way for plain decoding and for every method. Scheduling
does not overlap with forwards, which it would not on a CPU anyway.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import astuple
from time import perf_counter
from typing import Any

from drafttree.bench.protocol import (
    HELD_BACK,
    EngineInfo,
    EngineSpec,
    ForwardShape,
    Generation,
    Request,
    Traced,
)
from drafttree.bench.serve import serve


class SglangEngine:
    """A scheduler with its model, without a server around it."""

    def __init__(self, spec: EngineSpec) -> None:
        import sglang
        from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        arguments = ServerArgs(
            model_path=spec.model,
            dtype=spec.dtype,
            context_length=spec.max_model_len + HELD_BACK["sglang"],
            max_running_requests=spec.batch_size,
            max_total_tokens=_kv_slots(spec),
            disable_overlap_schedule=True,
            skip_tokenizer_init=not spec.tokenizer,
            random_seed=0,
            log_level="error",
            **_for_float32(spec),
            **_speculative(spec),
        )
        arguments.resolve_once()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        configure_scheduler_process(arguments, 0)
        self._scheduler = Scheduler(arguments, PortArgs.init_new(arguments))
        # Answers are read from the requests, so the output sockets have no reader.
        self._scheduler.ipc_channels.send_to_detokenizer.send_output = _ignore
        self._scheduler.ipc_channels.send_to_tokenizer.send_output = _ignore
        self._next_id = 0
        device = str(self._scheduler.tp_worker.model_runner.device)
        self.info = EngineInfo(version=str(sglang.__version__), device=device)

    def generate(self, requests: list[Request]) -> list[Generation]:
        """Answer all requests together and time each engine step."""
        running: list[tuple[Any, Generation]] = []
        results: list[Generation] = []
        started = perf_counter()
        for request in requests:
            sampling = {
                "temperature": request.temperature,
                "max_new_tokens": request.max_tokens,
                "sampling_seed": request.seed,
                "json_schema": request.schema,
            }
            results.append(Generation(prompt_tokens=len(request.token_ids)))
            running.append((self._submit(request.token_ids, sampling), results[-1]))
        while running:
            decoding = all(generation.token_ids for _, generation in running)
            self._step()
            for request, generation in running:
                _check_not_aborted(request)
                tokens = [int(token) for token in request.output_ids_through_stop]
                generation.extend(tokens, decoding=decoding)
            ended = perf_counter()
            share = (ended - started) / len(running)
            started = ended
            for _, generation in running:
                generation.add_seconds(share, decoding=decoding)
            running = [each for each in running if not each[0].finished()]
        return results

    def top_logprobs(self, token_ids: list[int]) -> dict[int, float]:
        """The two most likely next tokens after `token_ids` and their log-probabilities."""
        found = self._next_logprobs(token_ids, best=2)
        values, tokens = found.output_top_logprobs_val[0], found.output_top_logprobs_idx[0]
        return {int(token): float(value) for token, value in zip(tokens, values, strict=True)}

    def logprobs(self, asked: tuple[list[int], list[int]]) -> dict[int, float]:
        """The log-probabilities of some next tokens: those after the first list, of the second."""
        token_ids, tokens = asked
        found = self._next_logprobs(token_ids, tokens=tokens)
        values = found.output_token_ids_logprobs_val[0]
        return {token: float(value) for token, value in zip(tokens, values, strict=True)}

    def forward_seconds(self, shape: ForwardShape) -> list[float]:
        """Time forwards of an artificial batch; cached prefixes are lost."""
        from drafttree.sglang.forward import forward_seconds

        self._idle()
        self._scheduler.flush_cache()
        seconds = forward_seconds(self._scheduler.tp_worker.model_runner, *astuple(shape))
        return seconds

    def prime(self, _: None) -> tuple[int, int]:
        """Let the drafter prime in one short forward, as the scheduler does between requests."""
        self._idle()
        progress: tuple[int, int] = self._scheduler.draft_worker.drafttree_prime(
            self._scheduler.tree_cache
        )
        return progress

    def reset(self, tables: bool) -> None:
        """Drop cached prefixes, and with them what the method learned and its counters."""
        self._idle()
        if not self._scheduler.flush_cache():
            raise RuntimeError("SGLang's cache was not flushed")

    def counters(self, _: None) -> dict[str, int]:
        """The tree worker's counters."""
        counts: dict[str, int] = self._scheduler.draft_worker.counters.as_dict()
        return counts

    def explain(self, _: None) -> list[dict[str, Any]]:
        """How the method chose its tree sizes; empty if they are fixed."""
        rows: list[dict[str, Any]] = self._scheduler.draft_worker.explain()
        return rows

    def choices(self, _: None) -> list[dict[str, Any]]:
        """Empty, as the drafter chooses the sizes."""
        return []

    def acceptance(self, _: None) -> dict[str, Any]:
        """The method's acceptance statistics."""
        counts: dict[str, Any] = self._scheduler.draft_worker.acceptance()
        return counts

    def trace(self, request: Request) -> Traced:
        """Answer a request alone, and record its decode steps."""
        from drafttree.sglang.tracing import start_tracing, stop_tracing

        worker = self._scheduler.draft_worker
        start_tracing(worker)
        [generation] = self.generate([request])
        tracer = stop_tracing(worker)
        return Traced(generation, tracer.prompt_seconds, tracer.steps)

    def draft_seconds(self, _: None) -> float:
        """Seconds spent drafting with a model."""
        return float(self._scheduler.draft_worker.draft_seconds)

    def _next_logprobs(
        self, token_ids: list[int], best: int = 0, tokens: list[int] | None = None
    ) -> Any:
        """What SGLang has kept of the log-probabilities of the token after `token_ids`."""
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        request = self._submit(token_ids, sampling, best, tokens)
        while not request.finished():
            self._step()
        _check_not_aborted(request)
        return request.logprob

    def _submit(
        self,
        token_ids: list[int],
        sampling: dict[str, Any],
        best: int = 0,
        tokens: list[int] | None = None,
    ) -> Any:
        """Queue a request and return SGLang's `Req`, which collects the output.

        Args:
            token_ids: The prompt.
            sampling: Arguments of SGLang's `SamplingParams`.
            best: How many of the most likely tokens to keep the log-probabilities of.
            tokens: Further tokens to keep the log-probabilities of.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        parameters = SamplingParams(**sampling)
        parameters.normalize(None)
        self._next_id += 1
        # A request with a schema that is new waits until its grammar is compiled.
        queues = self._scheduler.waiting_queue, self._scheduler.grammar_manager.grammar_queue
        before = [len(queue) for queue in queues]
        self._scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=f"bench-{self._next_id}",
                input_text=None,
                input_ids=array("q", token_ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=parameters,
                return_logprob=bool(best or tokens),
                logprob_start_len=len(token_ids),
                top_logprobs_num=best,
                token_ids_logprob=tokens,
                stream=False,
            )
        )
        for queue, length in zip(queues, before, strict=True):
            if len(queue) > length:
                _check_not_aborted(queue[-1])
                return queue[-1]
        raise RuntimeError(f"SGLang refused a request of {len(token_ids)} tokens")

    def _step(self) -> None:
        """Run one iteration of the scheduler's own loop."""
        import torch

        scheduler = self._scheduler
        with torch.inference_mode():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch

    def _idle(self) -> None:
        """Let the scheduler retire the last batch."""
        self._step()


def _speculative(spec: EngineSpec) -> dict[str, Any]:
    """Server arguments for a tree method, whose options are passed in the environment."""
    from drafttree.sglang.options import set_options

    if spec.speculative_config is None:
        return {}
    options = dict(spec.speculative_config)
    name = options.pop("method").replace("_", "-")
    draft_model = {"speculative_draft_model_path": options.pop("model", None)}
    set_options(**options)
    return {"speculative_algorithm": name, **draft_model}


def _for_float32(spec: EngineSpec) -> dict[str, Any]:
    """Server arguments for float32 on a GPU, which most of SGLang's kernels do not have.

    Triton computes attention and, by an environment variable, PyTorch norms and activations.
    """
    from sglang.srt.utils import is_cpu, is_cuda

    if spec.dtype != "float32" or is_cpu() or not is_cuda():
        return {}
    os.environ.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
    return {"attention_backend": "triton"}


def _kv_slots(spec: EngineSpec) -> int:
    """KV slots for the whole context and for two trees of every request."""
    return spec.batch_size * (spec.max_model_len + 512)


def _check_not_aborted(request: Any) -> None:
    """Refuse an answer that SGLang aborts, which it ends as if it were complete.

    Raises:
        RuntimeError: It does.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = request.finished_reason or request.to_finish
    if isinstance(reason, FINISH_ABORT):
        raise RuntimeError(f"SGLang aborted a request: {reason.message}")


def _ignore(*args: object, **kwargs: object) -> None:
    """Send nothing."""


if __name__ == "__main__":
    serve(SglangEngine)
