"""Steps of vLLM's V1 model runner on a fake GPU, without an engine process.

The runner, the engine's input batch and its sampler are the real ones. The scheduler, the models
and what the engine's own runner does in a step are stood in for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import _custom_ops
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker import gpu_input_batch
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from drafttree.vllm import adopted
from drafttree.vllm.drafters import (
    columns,
    draft_layer,
    draft_model,
    hidden_state,
    in_step,
    model_free,
)
from fake_gpu.record import Record
from fake_gpu.stand_ins import BLOCK, MAX_LEN, MAX_REQUESTS, ONE_RANK
from fake_gpu.tensors import Gpu
from fake_gpu.vllm_graphs import vllm_graphs
from fake_gpu.vllm_v1_hosts import HostRunner


@dataclass
class Decoded:
    """What came of a run.

    Attributes:
        texts: The output of each request.
        trees: The draft tokens and parents of each step's trees, by request.
        counts: The runner's counters.
        acceptance: The drafter's counters.
        steps: What the GPU was asked for in each step, what the engine itself does left out.
        mixed: Number of steps with a chunk of a prompt beside drafts.
    """

    texts: dict[str, list[int]] = field(default_factory=dict)
    trees: list[dict[str, tuple[list[int], list[int]]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    mixed: int = 0


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        prompt: Its prompt.
        length: Number of tokens to emit.
        parameters: Keyword arguments of its `SamplingParams`.
        starts: The step in which it arrives.
    """

    prompt: Sequence[int]
    length: int
    parameters: dict[str, Any] = field(default_factory=dict)
    starts: int = 0


@contextmanager
def _pinned_memory() -> Iterator[None]:
    """Let the engine pin memory and find itself alone, as it does on a GPU; all on one rank."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gpu_input_batch, "PIN_MEMORY", True))
        # vLLM for CPUs lacks this operator of a GPU.
        in_torch = _custom_ops.apply_repetition_penalties_torch
        stack.enter_context(mock.patch.object(_custom_ops, "apply_repetition_penalties", in_torch))
        for holder, name, value in (
            (model_free, "get_tp_group", ONE_RANK),
            (columns, "get_tp_group", ONE_RANK),
            (in_step, "get_tp_group", ONE_RANK),
            (draft_model, "get_tp_group", ONE_RANK),
            (hidden_state, "get_tp_group", ONE_RANK),
            (adopted, "get_tp_group", ONE_RANK),
            (adopted, "build_logits_processors", LogitsProcessors()),
            (draft_layer, "set_current_vllm_config", nullcontext()),
        ):
            stack.enter_context(mock.patch.object(holder, name, return_value=value))
        yield


def decode(
    host: type[HostRunner],
    options: dict[str, Any],
    asked: dict[str, Asked],
    weights: torch.Tensor,
    gpu: Gpu | None,
    *,
    chunk: int = 5,
    waits: bool = False,
) -> Decoded:
    """Serve requests until all have finished, on the CPU or on a fake GPU.

    Args:
        host: The runner.
        options: Options of its method.
        asked: The requests by name.
        weights: The target's logits after each token, `[V, V]`.
        gpu: The fake GPU; None for the CPU.
        chunk: Most tokens of a prompt that are read in a step.
        waits: Whether the host may wait while it samples.
    """
    graphs = nullcontext() if gpu is None else vllm_graphs(gpu)
    with _pinned_memory(), graphs:
        return _Driver(host, options, weights, gpu, waits).run(asked, chunk)


class _Driver:
    """Schedules requests, and calls a runner in the order in which the engine does."""

    def __init__(
        self,
        host: type[HostRunner],
        options: dict[str, Any],
        weights: torch.Tensor,
        gpu: Gpu | None,
        waits: bool,
    ) -> None:
        self._gpu = gpu
        runner = self._runner = host(weights, torch.device("cpu" if gpu is None else "cuda"))
        if gpu is not None:
            runner.uncounted = gpu.recording
        runner.set_up_host(options)
        self._waits = waits
        self._free = list(range(MAX_REQUESTS))
        self._drafts: dict[str, list[int]] = {}
        self.result = Decoded()

    def run(self, asked: dict[str, Asked], chunk: int) -> Decoded:
        """Serve the requests."""
        step, finished = 0, list[str]()
        waiting = dict(asked)
        while waiting or self._runner.requests:
            arrived = [name for name, each in waiting.items() if each.starts <= step]
            new = [self._request(name, waiting.pop(name)) for name in arrived if self._free]
            recording = nullcontext(Record()) if self._gpu is None else self._gpu.recording()
            with recording as record:
                finished = self._step(new, finished, chunk)
            self.result.steps.append(record)
            step += 1
            assert step < 200, "the requests do not finish"
        runner = self._runner
        self.result.counts = runner.counters.as_dict()
        self.result.acceptance = runner.acceptance()
        return self.result

    def _request(self, name: str, asked: Asked) -> CachedRequestState:
        # A request's blocks are adjacent.
        first = self._free.pop(0) * MAX_LEN // BLOCK
        blocks = [*range(first, first + MAX_LEN // BLOCK)]
        parameters = SamplingParams(max_tokens=asked.length, **asked.parameters)
        seed = parameters.seed
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return CachedRequestState(
            name, list(asked.prompt), [], parameters, generator, (blocks,), 0, []
        )

    def _without_waiting(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._gpu is None else self._gpu.no_waiting()

    def _step(self, new: list[CachedRequestState], finished: list[str], chunk: int) -> list[str]:
        """One step; returns the requests that have finished in it."""
        runner, batch = self._runner, self._runner.input_batch
        output = SimpleNamespace(
            finished_req_ids=finished,
            scheduled_new_reqs=new,
            preempted_req_ids=None,
            scheduled_spec_decode_tokens={},
        )
        with self._without_waiting():
            runner._update_states(output)
        if not batch.num_reqs:
            return []
        drafts = {name: self._drafts[name] for name in batch.req_ids if self._drafts.get(name)}
        output.scheduled_spec_decode_tokens = drafts
        counts = []
        for name in batch.req_ids:
            request = runner.requests[name]
            unread = request.num_tokens - request.num_computed_tokens
            counts.append(min(unread, chunk) + len(drafts.get(name, ())))
        self.result.mixed += bool(drafts) and any(
            runner.requests[name].num_computed_tokens < runner.requests[name].num_prompt_tokens
            for name in batch.req_ids
        )
        scheduled = np.array(counts, np.int32)
        with self._without_waiting():
            rows, _ = runner._prepare_inputs(output, scheduled)
            hidden = runner.forward_step(scheduled)
        self.result.trees.append(runner.trees_of(drafts))
        with runner.uncounted():
            logits = hidden[rows]
        with nullcontext() if self._waits else self._without_waiting():
            sampled = runner._sample(logits, None).sampled_token_ids
        tokens = self._tokens(sampled)
        done = self._advance(tokens, counts, drafts)
        with self._without_waiting():
            runner.propose_draft_token_ids(output, tokens)
        taken = runner.take_draft_token_ids()
        drafted = taken.draft_token_ids if taken is not None else ()
        self._drafts = dict(zip(batch.req_ids, drafted, strict=False))
        for name in batch.req_ids:
            runner.check_cache(name)
        return done

    def _tokens(self, sampled: torch.Tensor) -> list[list[int]]:
        """The tokens that the engine takes of each request's, on the host."""
        runner = self._runner
        with runner.uncounted():
            emitted = sampled.tolist()
        discarded = runner.discard_request_mask.np
        return [
            [] if discarded[row] else [token for token in each if token >= 0]
            for row, each in enumerate(emitted)
        ]

    def _advance(
        self, tokens: list[list[int]], counts: list[int], drafts: dict[str, list[int]]
    ) -> list[str]:
        """Append tokens to the requests, which have finished when they have enough."""
        runner, batch, done = self._runner, self._runner.input_batch, []
        for row, (name, each) in enumerate(zip(batch.req_ids, tokens, strict=True)):
            request = runner.requests[name]
            rejected = len(drafts.get(name, ())) - max(len(each) - 1, 0)
            request.num_computed_tokens += counts[row] - rejected
            most = request.sampling_params.max_tokens - len(request.output_token_ids)
            each[most:] = []
            first = int(batch.num_tokens_no_spec[row])
            batch.token_ids_cpu[row, first : first + len(each)] = each
            batch.num_tokens_no_spec[row] = first + len(each)
            request.output_token_ids += each
            if len(request.output_token_ids) == request.sampling_params.max_tokens:
                done.append(name)
                self.result.texts[name] = list(request.output_token_ids)
                self._free.append(request.block_ids[0][0] * BLOCK // MAX_LEN)
        return done
