"""Steps of vLLM's V1 model runner with a model-free drafter, without an engine process.

The runner, the engine's input batch and its sampler are the real ones. The scheduler, the target
and what the engine's own runner does in a step are stood in for here: the target's logits follow
from the last token, and the KV of a token is the token, so that a text can be read in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tree_kernels.kv_move import movers_of
from vllm import _custom_ops
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_input_batch
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from drafttree.drafter import Target
from drafttree.transfer import on_device
from drafttree.vllm import adopted
from drafttree.vllm.drafters import model_free
from drafttree.vllm.drafters.model_free import ModelFreeRunner
from fake_gpu.record import Record
from fake_gpu.tensors import Gpu
from recycle_plugin import METHOD

VOCAB = 64
MAX_REQUESTS = 4
MAX_LEN = 96
BLOCK = 16
_GROUP = SimpleNamespace(world_size=1, rank_in_group=0)


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


class _Stock(GPUModelRunner):
    """What the engine's own runner does in a step, as far as drafting depends on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.max_num_reqs, self.max_model_len = MAX_REQUESTS, MAX_LEN
        budget = MAX_REQUESTS * MAX_LEN
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=budget, max_num_scheduled_tokens=None, scheduler_cls=None
        )
        self.vllm_config = self.lora_config = None
        self.supports_mm_inputs = self.uses_mrope = False
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: VOCAB, dtype=torch.float32, model="none"
        )
        self.requests: dict[str, CachedRequestState] = {}
        self.sampler = Sampler()
        # vLLM for CPUs would take an operator of its own.
        draw = self.sampler.topk_topp_sampler
        draw.forward = draw.forward_native
        self.attn_groups: list[Any] = []
        self._draft_token_ids: Any = None
        self.discard_request_mask = SimpleNamespace(np=np.zeros(MAX_REQUESTS, np.bool_))
        self.input_batch = InputBatch(
            MAX_REQUESTS, MAX_LEN, budget, device, VOCAB, [BLOCK], [MAX_LEN // BLOCK]
        )
        self.input_ids = SimpleNamespace(gpu=torch.zeros(budget, dtype=torch.int32, device=device))
        self.positions = torch.zeros(budget, dtype=torch.int64, device=device)
        slots = MAX_REQUESTS * MAX_LEN
        self.cache = torch.full((slots // BLOCK, 1, BLOCK, 1), -1.0, device=device)
        self.uncounted: Any = nullcontext

    def _update_states(self, scheduler_output: Any) -> None:
        with self.uncounted():
            for name in scheduler_output.finished_req_ids:
                self.input_batch.remove_request(name)
                del self.requests[name]
            self.input_batch.condense()
            for each in scheduler_output.scheduled_new_reqs:
                self.requests[each.req_id] = each
                self.input_batch.add_request(each)
            self.input_batch.refresh_metadata()

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled: Any) -> Any:
        batch, drafts = self.input_batch, scheduler_output.scheduled_spec_decode_tokens
        ids, positions, slots, rows = [], [], [], []
        for row, (name, count) in enumerate(zip(batch.req_ids, num_scheduled, strict=True)):
            request, drafted = self.requests[name], drafts.get(name, [])
            first, own = request.num_computed_tokens, count - len(drafted)
            ids += [*batch.token_ids_cpu[row, first : first + own].tolist(), *drafted]
            positions += range(first, first + count)
            place = request.block_ids[0][0] * BLOCK
            slots += range(place + first, place + first + count)
            rows += range(len(ids) - 1 - len(drafted), len(ids))
            self.discard_request_mask.np[row] = first + own < request.num_tokens
        with self.uncounted():
            mapping = batch.block_table.block_tables[0].slot_mapping.gpu
            for target, values in (
                (self.input_ids.gpu, np.array(ids, np.int32)),
                (self.positions, np.array(positions)),
                (mapping, np.array(slots)),
            ):
                target[: len(values)] = on_device(values, self.device)
            of_logits = on_device(np.array(rows), self.device)
        return of_logits, None

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        ids, self._draft_token_ids = self._draft_token_ids, None
        return None if ids is None else DraftTokenIds(list(self.input_batch.req_ids), ids)


class _Runner(ModelFreeRunner, _Stock):
    """The runner under test."""

    def _target(self, *args: Any, **kwargs: Any) -> Target:
        return Target("none", VOCAB, self.device, torch.float32, logging.getLogger(__name__))


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
            (model_free, "get_tp_group", _GROUP),
            (adopted, "get_tp_group", _GROUP),
            (adopted, "build_logits_processors", LogitsProcessors()),
            (ModelFreeRunner, "_why_no_bound_drafts", None),
        ):
            stack.enter_context(mock.patch.object(holder, name, return_value=value))
        yield


def decode(
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
        options: Options of Token Recycling.
        asked: The requests by name.
        weights: The target's logits after each token, `[V, V]`.
        gpu: The fake GPU; None for the CPU.
        chunk: Most tokens of a prompt that are read in a step.
        waits: Whether the host may wait while it samples.
    """
    with _pinned_memory():
        return _Driver(options, weights, gpu, waits).run(asked, chunk)


class _Driver:
    """Schedules requests, and calls a runner in the order in which the engine does."""

    def __init__(
        self, options: dict[str, Any], weights: torch.Tensor, gpu: Gpu | None, waits: bool
    ) -> None:
        self._gpu = gpu
        device = torch.device("cpu" if gpu is None else "cuda")
        runner = self._runner = _Runner(device)
        runner.num_spec_tokens = METHOD.parse(options).num_draft_tokens
        if gpu is not None:
            runner.uncounted = gpu.recording
        runner.set_up(METHOD, options, None)
        runner._movers = [movers_of([runner.cache])]
        self._weights = weights.to(device)
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
        self.result.trees.append(
            {name: (ids, runner._stored[name].parents.tolist()) for name, ids in drafts.items()}
        )
        with self._without_waiting():
            rows, _ = runner._prepare_inputs(output, np.array(counts, np.int32))
            runner._show_masks(runner._step)
        logits = self._forward(rows, sum(counts))
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
            self._check_cache(name)
        return done

    def _forward(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """The target's logits of some rows of a step, whose KV is written."""
        runner = self._runner
        slots = runner.input_batch.block_table.block_tables[0].slot_mapping.gpu[:count]
        with runner.uncounted():
            tokens = runner.input_ids.gpu[:count].long()
            runner.cache.view(-1)[slots] = tokens.float()
            return self._weights[tokens[rows]]

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

    def _check_cache(self, name: str) -> None:
        """The KV of a request's text is in its slots, in order."""
        runner = self._runner
        request = runner.requests[name]
        text = [*request.prompt_token_ids, *request.output_token_ids]
        count = min(request.num_computed_tokens, len(text))
        first = request.block_ids[0][0] * BLOCK
        with runner.uncounted():
            cached = runner.cache.view(-1)[first : first + count].tolist()
        assert cached == text[:count], f"the KV of {name} is not that of its text"
