"""Dummy requests with draft trees, served at the start so that nothing compiles while serving.

Triton compiles a kernel at its first launch, which takes a few tenths of a second for which all
requests wait. vLLM serves dummy requests for its own kernels, in which drafters take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec

_SHORT, _LONG = 20, 600
"""Tokens of prompts. Attention to few rows is shared by programs, that to many is not."""
# With a seed, no number is drawn that a request without one would get otherwise.
_GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}
_SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 1}


def serve_dummy_requests(worker: Any, sizes: Sequence[int]) -> bool:
    """Serve requests with trees of each size, greedy alone and beside a sampled one.

    Args:
        worker: A worker whose KV caches are empty. Its drafter learns from the requests.
        sizes: Draft tokens of the trees.

    Returns:
        Whether requests were served: not where layers keep anything but keys and values of tokens.
    """
    runner = worker.model_runner
    groups = runner.kv_cache_config.kv_cache_groups
    if not all(isinstance(group.kv_cache_spec, AttentionSpec) for group in groups):
        return False
    served = False
    runner.kv_connector.set_disabled(True)
    try:
        with torch.inference_mode():
            for size in sizes:
                for prompt, sampling in (
                    (_SHORT, (_GREEDY,)),
                    (_LONG, (_GREEDY, _SAMPLED)[: runner.max_num_reqs]),
                ):
                    served |= _Requests(worker, size, prompt, sampling).serve()
    finally:
        runner.kv_connector.set_disabled(False)
    return served


class _Requests:
    """Requests that start one after another.

    Args:
        worker: The worker.
        size: Draft tokens of each tree.
        prompt: Greatest number of tokens of a prompt.
        sampling: Parameters of each request's sampling.
    """

    def __init__(
        self, worker: Any, size: int, prompt: int, sampling: Sequence[dict[str, Any]]
    ) -> None:
        runner, count = worker.model_runner, len(sampling)
        budget, cache = runner.scheduler_config.max_num_batched_tokens, runner.kv_cache_config
        self._worker, self._size = worker, size
        after_prompt = (1 + count) * (1 + size)
        prompt = min(prompt, budget - (count - 1) * (1 + size), runner.max_model_len - after_prompt)
        self._prompt = [token % runner.vocab_size for token in range(prompt)]
        self._sampling = {
            f"_dummy_{number}": SamplingParams(max_tokens=after_prompt, **each)
            for number, each in enumerate(sampling)
        }
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        self._needed = [-(-(prompt + after_prompt) // each) for each in sizes]
        self._blocks = iter(range(1, cache.num_blocks))  # the engine keeps block 0
        self._fits = (
            prompt > 0
            and count * (1 + size) <= budget
            and count * sum(self._needed) < cache.num_blocks
        )

    def serve(self) -> bool:
        """Serve them; returns whether they fit into the engine's limits.

        There are steps with a prompt alone, with a prompt beside a tree, with trees, and without
        drafts.
        """
        if not self._fits:
            return False
        computed: dict[str, int] = {}
        for starting in self._sampling:
            self._step(computed, self._size, starting)
        self._step(computed, self._size)
        self._step(computed, 0)
        ended = {*self._sampling}
        self._worker.execute_model(replace(SchedulerOutput.make_empty(), finished_req_ids=ended))
        return True

    def _step(self, computed: dict[str, int], drafts: int, starting: str | None = None) -> None:
        """Serve a step.

        Args:
            computed: Tokens of the running requests so far; brought up to date.
            drafts: Draft tokens of each running request. They are on the device already.
            starting: A request that starts.
        """
        rows = dict.fromkeys(computed, 1 + drafts)
        if starting is not None:
            rows[starting] = len(self._prompt)
        running = replace(
            CachedRequestData.make_empty(),
            req_ids=[*computed],
            num_computed_tokens=[*computed.values()],
            num_output_tokens=[1] * len(computed),
            new_block_ids=[None] * len(computed),
        )
        output = replace(
            SchedulerOutput.make_empty(),
            num_spec_tokens_to_schedule=self._size,
            scheduled_cached_reqs=running,
            scheduled_new_reqs=[] if starting is None else [self._new(starting)],
            scheduled_spec_decode_tokens=(
                {name: [0] * drafts for name in computed} if drafts else {}
            ),
            num_scheduled_tokens=rows,
            total_num_scheduled_tokens=sum(rows.values()),
        )
        self._worker.execute_model(output)
        self._worker.sample_tokens(None)
        for name, count in rows.items():
            computed[name] = computed.get(name, 0) + count

    def _new(self, name: str) -> NewRequestData:
        return NewRequestData(
            req_id=name,
            prompt_token_ids=self._prompt,
            mm_features=[],
            sampling_params=self._sampling[name],
            pooling_params=None,
            block_ids=tuple([next(self._blocks) for _ in range(each)] for each in self._needed),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=self._prompt,
        )
