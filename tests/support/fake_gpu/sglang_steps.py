"""Whole steps of SGLang's scheduler with a tree worker, on the CPU or on a fake GPU.

Requests, batches, memory pools, the cache of prefixes, sampling, the relay between steps and the
processing of results are the engine's own. The loop around them does what the scheduler's does.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload, resolve_forward_inputs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from fake_gpu.record import Record
from fake_gpu.sglang_engine import ONE_RANK, Pools, configured, result_processor
from fake_gpu.sglang_graphs import GraphTarget, captured, graphs_for
from fake_gpu.sglang_hosts import TOKEN_RECYCLING, Host
from fake_gpu.sglang_target import TargetWorker, Weights
from fake_gpu.tensors import Gpu, held


@dataclass
class Decoded:
    """What came of a run.

    Attributes:
        texts: The output of each request.
        trees: Tokens and parents of each decode step's trees, by request.
        widths: The numbers of rows of a request that were verified.
        counts: The worker's counters.
        acceptance: The drafter's counters.
        steps: What the GPU was asked for in each decode step, what the engine does left out.
        starts: The same for each step that reads prompts.
        parts: Number of steps that read a part of a prompt.
        cached: Number of tokens of prompts that were found in the cache of prefixes.
        captured: The numbers of requests with a graph, by the rows of each.
        replayed: Rows of a request and number of requests of each graph that was replayed.
    """

    texts: dict[str, list[int]] = field(default_factory=dict)
    trees: list[dict[str, tuple[list[int], list[int]]]] = field(default_factory=list)
    widths: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    parts: int = 0
    cached: int = 0
    captured: dict[int, list[int]] = field(default_factory=dict)
    replayed: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        prompt: Its prompt.
        length: Number of tokens to emit.
        parameters: Keyword arguments of its `SamplingParams`.
        starts: The step in which it arrives.
        grammar: Makes SGLang's grammar of it.
        given: Further arguments of its `Req`.
    """

    prompt: Sequence[int]
    length: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    starts: int = 0
    grammar: Callable[[], Any] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


def decode(
    options: dict[str, Any],
    asked: dict[str, Asked],
    weights: Weights,
    gpu: Gpu | None,
    *,
    host: Host = TOKEN_RECYCLING,
    overlap: bool = True,
    chunk: int = 8,
    waits: bool = False,
    seeded: bool = False,
    requests: list[int] | None = None,
    group: Any = ONE_RANK,
) -> Decoded:
    """Serve requests until all have finished, on the CPU or on a fake GPU.

    Args:
        options: The method's options.
        asked: The requests by name.
        weights: The target.
        gpu: The fake GPU; None for the CPU.
        host: The worker and its method.
        overlap: Whether a step is launched before the last one's results are read.
        chunk: Most tokens of prompts that are read in a step.
        waits: Whether the host may wait for a GPU in drafttree's part of a step.
        seeded: Whether the engine samples by seeds.
        requests: The numbers of requests for which a GPU captures graphs; None without graphs.
        group: The tensor-parallel ranks that the worker knows of.
    """
    with ExitStack() as stack:
        settings, make = {}, TargetWorker
        if gpu is not None and requests is not None:
            settings, make = stack.enter_context(graphs_for(gpu, requests)), GraphTarget
        settings |= {"disable_overlap_schedule": not overlap}
        stack.enter_context(configured(host, options, gpu, seeded=seeded, group=group, **settings))
        return _Loop(host, weights, gpu, make, overlap=overlap, waits=waits).run(asked, chunk)


class _Loop:
    """The scheduler's loop."""

    def __init__(
        self,
        host: Host,
        weights: Weights,
        gpu: Gpu | None,
        make: type[TargetWorker],
        *,
        overlap: bool,
        waits: bool,
    ) -> None:
        self._gpu, self._overlap, self._waits = gpu, overlap, waits
        self.result = Decoded()
        device = "cpu" if gpu is None else "cuda"
        self._pools = pools = Pools.on(device)
        target = make(weights, pools.rows, pools.slots, gpu, self._unwatched)
        self._config = target.model_runner.model_config
        self._algorithm = SpeculativeAlgorithm.from_string(host.algorithm)
        made = self._worker = host.worker.of(host.method)(None, 0, 0, target)
        made.alloc_memory_pool()
        if isinstance(target, GraphTarget):
            with self._unwatched():
                target.init_attention_backends()
                made.init_attention_backends()
                target.model_runner.capture()
                made.init_cuda_graphs()
            runner = target.model_runner
            self.result.captured = captured(made._graphs, runner.decode_cuda_graph_runner)
            self.result.replayed = target.model_runner.replayed
        self._futures = FutureMap(torch.device(device), self._algorithm, pools.rows)
        self._processor = result_processor(pools, self._config, made, overlap=overlap)
        self._results: deque[tuple[Any, Any]] = deque()
        self._running: Any = None
        self._last: Any = None
        self._chunked: Any = None

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        with nullcontext() if self._gpu is None else self._gpu.unwatched():
            yield

    def run(self, asked: dict[str, Asked], chunk: int) -> Decoded:
        """Serve the requests."""
        waiting, requests, step = dict(asked), {}, 0
        while True:
            arrived = [name for name, each in waiting.items() if each.starts <= step]
            new = [_request(name, waiting.pop(name), self._config.vocab_size) for name in arrived]
            requests |= {each.rid: each for each in new}
            if not self._step(new, chunk) and not waiting:
                break
            step += 1
            assert step < 300, "the requests do not finish"
        self.result.texts = {
            name: [*each.output_ids_through_stop] for name, each in requests.items()
        }
        self.result.cached = sum(each.cached_tokens for each in requests.values())
        self.result.counts = self._worker.counters.as_dict()
        self.result.acceptance = self._worker.acceptance()
        return self.result

    def _step(self, new: list[Any], chunk: int) -> bool:
        """One round of the loop; returns whether there was anything to do."""
        with self._unwatched():
            batch = self._next_batch(new, chunk)
            synchronous = not self._overlap or (
                batch is not None and batch.forward_mode.is_decode() and batch.grammar_needs_sync()
            )
            if synchronous and self._results:
                self._process()
        if batch is not None:
            result = self._run(batch)
            self._results.append((batch.copy(), result))
        with self._unwatched():
            # The results of this step itself, or those of the last one.
            while len(self._results) > (batch is not None and self._overlap):
                self._process()
        was_busy, self._last = self._last is not None or batch is not None, batch
        return was_busy

    def _next_batch(self, new: list[Any], chunk: int) -> Any:
        last, chunked = self._last, self._chunked
        if chunked is not None:
            checkpoint_kv_cache(chunked, self._pools.prefixes)
        if last is not None and last.forward_mode.is_extend():
            last.filter_batch(
                reqs_to_exclude=[each for each in (chunked, last.chunked_req) if each]
            )
            if self._running is None or self._running.is_empty():
                self._running = last
            elif not last.is_empty():
                self._running.merge_batch(last)
        if self._running is not None:
            self._running.filter_batch()
        if chunked is not None or new:
            return self._prompts(new, chunk)
        if self._running is None or self._running.is_empty():
            return None
        self._running.prepare_for_decode()
        return self._running

    def _prompts(self, new: list[Any], chunk: int) -> Any:
        """A batch that reads prompts, of the last request perhaps a part."""
        for request in new:
            request.init_next_round_input(self._pools.prefixes)
            request.lock = self._pools.prefixes.lock(request.last_node)
        chosen = [*([] if self._chunked is None else [self._chunked]), *new]
        if self._chunked is not None:
            self._chunked.init_next_round_input()
        for request in chosen:
            unread = len(request.full_untruncated_fill_ids)
            request.extend_end = min(unread, request.prefix_len + chunk)
        parts = [each for each in chosen if each.extend_end < len(each.full_untruncated_fill_ids)]
        assert len(parts) <= 1, "the engine reads parts of one prompt at a time"
        self._chunked = parts[0] if parts else None
        self.result.parts += len(parts)
        for each in parts:
            each.inflight_middle_chunks += 1
        batch = ScheduleBatch.init_new(
            chosen,
            self._pools.rows,
            self._pools.slots,
            self._pools.prefixes,
            self._config,
            self._overlap,
            self._algorithm,
            chunked_req=self._chunked,
        )
        batch.prepare_for_extend()
        return batch

    def _run(self, batch: Any) -> Any:
        """Launch a step."""
        with self._unwatched():
            if self._overlap:
                self._futures.resolve_seq_lens_cpu(batch)
            resolve_forward_inputs(batch, self._futures)
        slots, decodes = batch.req_pool_indices, batch.forward_mode.is_decode()
        publish = partial(self._publish, slots) if self._overlap else None
        scheduler: Any = SimpleNamespace()
        # Entered as a whole, because it copies the parameters of sampling to the device.
        isolated = Scheduler._forward_isolation(scheduler, batch, overlap=False)
        with self._unwatched():
            isolated.__enter__()
        recording = nullcontext(Record()) if self._gpu is None else self._gpu.recording()
        with recording as record, self._without_waiting():
            result = self._worker.forward_batch_generation(batch, publish)
        if decodes:
            self._record_trees(batch)
        isolated.__exit__(None, None, None)
        (self.result.steps if decodes else self.result.starts).append(record)
        with self._unwatched():
            self._relay(batch, result, slots)
        return result

    def _without_waiting(self) -> AbstractContextManager[Any]:
        if self._gpu is None or self._waits:
            return nullcontext()
        return self._gpu.no_waiting()

    def _publish(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        with self._unwatched():
            self._futures.publish(slots, lengths)

    def _relay(self, batch: Any, result: Any, slots: torch.Tensor) -> None:
        """What a step leaves for the next one."""
        result.copy_done = torch.get_device_module(batch.device).Event()
        if self._overlap:
            self._futures.stash(slots, RelayPayload.from_ngram(result.next_draft_input))
        batch.spec_info, batch.input_ids = result.next_draft_input, None
        if self._overlap:
            batch.spec_info.future_indices = slots
        elif result.new_seq_lens is not batch.seq_lens:
            batch.seq_lens = result.new_seq_lens
            batch.seq_lens_cpu = result.new_seq_lens.to("cpu")
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=False)

    def _process(self) -> None:
        batch, result = self._results.popleft()
        if batch.forward_mode.is_decode():
            self._processor.process_batch_result_decode(batch, result)
        else:
            self._processor.process_batch_result_prefill(batch, result)

    def _record_trees(self, batch: Any) -> None:
        """Note the trees that the worker verified."""
        trees = self._worker.drafted.trees
        self.result.widths.add(trees.tokens.shape[1])
        by_request = zip(
            *(held(each).tolist() for each in (trees.tokens, trees.parents, trees.tree_size)),
            strict=True,
        )
        self.result.trees.append(
            {
                request.rid: (tokens[:size], parents[:size])
                for request, (tokens, parents, size) in zip(batch.reqs, by_request, strict=True)
            }
        )


def _request(name: str, asked: Asked, vocab_size: int) -> Any:
    parameters = SamplingParams(max_new_tokens=asked.length, **asked.parameters)
    parameters.normalize(None)
    request = Req(
        name, "", array("q", asked.prompt), parameters, vocab_size=vocab_size, **asked.given
    )
    request.grammar = None if asked.grammar is None else asked.grammar()
    return request
