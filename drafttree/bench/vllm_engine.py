"""vLLM in the bench: an engine in this process, driven step by step through a pipe.

Because the bench steps the engine itself, it can time every engine step and count decode steps from
the engine's own outputs, in the same way for plain decoding and for every method.
"""

from __future__ import annotations

import os
from dataclasses import astuple
from math import inf
from time import perf_counter
from typing import Any

from drafttree.bench.protocol import (
    EngineInfo,
    EngineSpec,
    ForwardShape,
    Generation,
    Request,
    Traced,
)
from drafttree.bench.serve import serve


class VllmEngine:
    """A `vllm.LLM` in this process."""

    def __init__(self, spec: EngineSpec) -> None:
        import vllm
        from vllm.platforms import current_platform

        device = str(current_platform.device_type)
        shared: dict[str, Any] = {}
        if device != "cpu":
            # With a size for the KV cache the engine only checks that this share is free.
            size = spec.kv_cache_bytes
            share = 0.42 if size is None else 0.05
            shared = {"gpu_memory_utilization": share, "kv_cache_memory_bytes": size}
        if _needs_no_prefix_caching(spec):
            shared["enable_prefix_caching"] = False
        if spec.speculative_config is not None:
            shared["speculative_config"] = spec.speculative_config
        self._llm: Any = vllm.LLM(
            model=spec.model,
            dtype=spec.dtype,
            enforce_eager=spec.eager,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.batch_size,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            skip_tokenizer_init=not spec.tokenizer,
            seed=0,
            **shared,
        )
        self._suffix = (spec.speculative_config or {}).get("method") == "suffix"
        self._detokenize = spec.tokenizer
        self._next_id = 0
        config = self._llm.llm_engine.vllm_config
        self.info = EngineInfo(
            version=str(vllm.__version__),
            device=device,
            runner="v2" if getattr(config, "use_v2_model_runner", False) else "v1",
            timed=os.environ.get("TRITON_INTERPRET") != "1",
        )

    def generate(self, requests: list[Request]) -> list[Generation]:
        """Answer all requests together and time each engine step."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        engine = self._llm.llm_engine
        running: dict[str, Generation] = {}
        results: list[Generation] = []
        started = perf_counter()
        for request in requests:
            request_id = f"bench-{self._next_id}"
            self._next_id += 1
            params = SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                seed=request.seed,
                detokenize=self._detokenize,
                structured_outputs=(
                    None if request.schema is None else StructuredOutputsParams(request.schema)
                ),
            )
            engine.add_request(request_id, {"prompt_token_ids": request.token_ids}, params)
            running[request_id] = Generation(prompt_tokens=len(request.token_ids))
            results.append(running[request_id])
        while running:
            decoding = all(generation.token_ids for generation in running.values())
            active = list(running.values())
            for output in engine.step():
                tokens = [int(token) for token in output.outputs[0].token_ids]
                running[output.request_id].extend(tokens, decoding=decoding)
                if output.finished:
                    del running[output.request_id]
            ended = perf_counter()
            share = (ended - started) / len(active)
            started = ended
            for generation in active:
                generation.add_seconds(share, decoding=decoding)
        return results

    def top_logprobs(self, token_ids: list[int]) -> dict[int, float]:
        """The two most likely next tokens after `token_ids` and their log-probabilities."""
        return self._next_logprobs(token_ids, logprobs=2)

    def logprobs(self, asked: tuple[list[int], list[int]]) -> dict[int, float]:
        """The log-probabilities of some next tokens: those after the first list, of the second.

        They are -inf, so no tie, in versions of vLLM that cannot be asked for them.
        """
        from vllm import SamplingParams

        token_ids, tokens = asked
        if "logprob_token_ids" not in SamplingParams.__struct_fields__:
            return dict.fromkeys(tokens, -inf)
        found = self._next_logprobs(token_ids, logprob_token_ids=tokens)
        return {token: found[token] for token in tokens}

    def _next_logprobs(self, token_ids: list[int], **asked: Any) -> dict[int, float]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, **asked)
        prompt = {"prompt_token_ids": token_ids}
        output = self._llm.generate([prompt], params, use_tqdm=False)[0]
        entries = output.outputs[0].logprobs[0].items()
        return {int(token): float(entry.logprob) for token, entry in entries}

    def forward_seconds(self, shape: ForwardShape) -> list[float]:
        """Time forwards of an artificial batch; cached prefixes are lost.

        Empty for a model with recurrent layers, which compute such a batch as a prompt and not as
        drafts.
        """
        if self._llm.llm_engine.vllm_config.model_config.is_hybrid:
            return []
        self._llm.reset_prefix_cache()
        times: list[float] = self._llm.collective_rpc(_forward_seconds, args=astuple(shape))[0]
        return times

    def prime(self, _: None) -> tuple[int, int]:
        """Let the drafter prime in one short forward, as an engine core does between requests."""
        from drafttree.vllm.engine_priming import prime_once

        progress = prime_once(self._llm.llm_engine.engine_core.engine_core)
        assert progress is not None
        return progress

    def reset(self, tables: bool) -> None:
        """Drop cached prefixes; with `tables` also what the method learned and its counters."""
        self._llm.reset_prefix_cache()
        if tables:
            self._llm.collective_rpc(_new_proposer if self._suffix else "drafttree_reset")

    def counters(self, _: None) -> dict[str, int]:
        """The tree worker's counters, which are equal on all ranks."""
        counts: dict[str, int] = self._llm.collective_rpc("drafttree_counters")[0]
        return counts

    def explain(self, _: None) -> list[dict[str, Any]]:
        """How the method chose its tree sizes; empty if they are fixed."""
        rows: list[dict[str, Any]] = self._llm.collective_rpc("drafttree_explain")[0]
        return rows

    def choices(self, _: None) -> list[dict[str, Any]]:
        """Why the last sizes were chosen, where the scheduler chooses them; else empty."""
        rows: list[dict[str, Any]] = self._llm.collective_rpc("drafttree_choices")[0]
        return rows

    def acceptance(self, _: None) -> dict[str, Any]:
        """The method's acceptance statistics."""
        counts: dict[str, Any] = self._llm.collective_rpc("drafttree_acceptance")[0]
        return counts

    def trace(self, request: Request) -> Traced:
        """Answer a request alone, and record its decode steps."""
        from drafttree.vllm.tracing import start_tracing, stop_tracing

        self._llm.collective_rpc(start_tracing)
        [generation] = self.generate([request])
        [tracer] = self._llm.collective_rpc(stop_tracing)
        return Traced(generation, tracer.prompt_seconds, tracer.steps)

    def draft_seconds(self, _: None) -> float:
        """Seconds spent drafting with a model."""
        return float(self._llm.collective_rpc("drafttree_draft_seconds")[0])


def _needs_no_prefix_caching(spec: EngineSpec) -> bool:
    """Whether drafts can be verified only if prefixes are not cached; see `vllm.chain_choice`.

    It holds for the plain side too, so that both sides do the same.
    """
    from vllm import EngineArgs
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return False
    model = EngineArgs(model=spec.model, dtype=spec.dtype).create_model_config()
    return bool(model.is_hybrid)


def _forward_seconds(worker: Any, *shape: Any) -> list[float]:
    from drafttree.vllm.forward import forward_seconds

    return forward_seconds(worker.model_runner, *shape)


def _new_proposer(worker: Any) -> None:
    """Replace vLLM's proposer, which cannot forget the answers that it has cached."""
    runner = worker.model_runner
    runner.drafter = type(runner.drafter)(runner.vllm_config)


if __name__ == "__main__":
    serve(VllmEngine)
