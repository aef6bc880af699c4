"""Steps of vLLM's V2 model runner with draft trees, on the CPU and on a fake GPU.

Triton's interpreter must be there before vLLM is imported; see `v2_on_cpu`. The states of requests,
the preparation of a step's inputs, sampling and what follows it are the engine's own; the target is
a table of logits, and the steps are called one after another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gumbel_on_cpu
import numpy as np
import torch
from tree_kernels.kv_move import movers_of
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import sampler, states
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from drafttree.drafter import Target
from drafttree.testing.session import random_weights
from drafttree.vllm.v2 import runner as tree_runner
from drafttree.vllm.v2.runner import TreeRunnerV2
from fake_gpu.record import Record
from fake_gpu.session import fake_gpu
from fake_gpu.tensors import DeviceTensor, Gpu, held
from recycle_plugin import METHOD

VOCAB = 64
MAX_REQUESTS = 4
MAX_LEN = 96
BLOCK = 16
CHUNK = 5


class _Ignored:
    """In place of what of the engine does not matter to drafting."""

    num_new_sampled_tokens_per_step = 1

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


class Weights:
    """A target whose next token depends on the last one, and a little on its position."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._after = random_weights(VOCAB, generator).log()
        self._shifts = 0.3 * torch.randn(MAX_LEN, VOCAB, generator=generator)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]` after tokens at positions."""
        return self._after[tokens.long()] + self._shifts[positions.clamp(max=MAX_LEN - 1).long()]

    def plain_text(self, prompt: list[int], length: int) -> list[int]:
        """The most likely tokens after a prompt, decoded one by one."""
        text = [*prompt]
        for _ in range(length):
            last = torch.tensor(text[-1:]), torch.tensor([len(text) - 1])
            text.append(int(self.logits(*last).argmax()))
        return text[len(prompt) :]


class _Stock(GPUModelRunner):
    """The engine's own runner without a model, as far as drafting depends on it."""

    def __init__(self, device: torch.device, num_draft_tokens: int) -> None:
        self.device, self.vocab_size = device, VOCAB
        self.max_num_reqs, self.max_model_len = MAX_REQUESTS, MAX_LEN
        self.num_speculative_steps = num_draft_tokens
        self.decode_query_len = 1 + num_draft_tokens
        budget = MAX_REQUESTS * MAX_LEN
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=budget, max_num_scheduled_tokens=None, scheduler_cls=None
        )
        self.speculative_config = SimpleNamespace(
            num_speculative_tokens_per_batch_size=[[1, MAX_REQUESTS, num_draft_tokens]]
        )
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: VOCAB, dtype=torch.float32, model="none", rswa_window=None
        )
        self.parallel_config = None
        for absent in (
            *("adaptive_verification", "pooling_runner", "encoder_cache", "fast_prefill"),
            *("pcp_manager", "kv_block_zeroer", "speculator", "structured_outputs_worker"),
            *("pp_handler", "lora_config"),
        ):
            setattr(self, absent, None)
        self.use_pp, self.is_last_pp_rank, self.supports_mm_inputs = False, True, False
        self.model_state = self.prompt_logprobs_worker = _Ignored()
        self.lora_state = LoraState(max_num_reqs=MAX_REQUESTS)
        self.model = SimpleNamespace(compute_logits=lambda logits: logits)
        self.attn_groups: list[Any] = []
        self.req_states = RequestState(
            MAX_REQUESTS, MAX_LEN, budget, num_draft_tokens, VOCAB, device
        )
        self.input_buffers = InputBuffers(MAX_REQUESTS, budget, device)
        self.block_tables = BlockTables([BLOCK], MAX_REQUESTS, budget, [MAX_LEN // BLOCK], device)
        self.sampler = Sampler(
            SimpleNamespace(reasoning_config=None, model_config=self.model_config),
            *(MAX_REQUESTS, VOCAB, device, self.req_states),
            num_speculative_tokens=num_draft_tokens,
        )


class _Runner(TreeRunnerV2, _Stock):
    """The runner under test."""

    def _target(self, *args: Any, **kwargs: Any) -> Target:
        return Target("none", VOCAB, self.device, torch.float32, logging.getLogger(__name__))


@contextmanager
def _on(gpu: Gpu | None) -> Iterator[None]:
    """Let the engine find a device whose kernels read pinned memory, as a GPU's do."""

    class UvaBuffer:
        """Memory of the host's that the engine's kernels read and write."""

        def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()

        def uva(self, n: int | None = None) -> torch.Tensor:
            """The device's view of the first `n` elements."""
            return self.cpu[:n] if gpu is None else DeviceTensor(self.cpu[:n], gpu)

    def on_values(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if gpu is not None:
                gpu.record.launched(function.__name__)
            given = [held(each) if isinstance(each, torch.Tensor) else each for each in args]
            result = function(*given, **kwargs)
            return result if gpu is None or result is None else DeviceTensor(result, gpu)

        return call

    with ExitStack() as stack:
        for holder, name, value in (
            (buffer_utils, "UvaBuffer", UvaBuffer),
            (torch.cuda, "memory_allocated", lambda *args: 0),
            (tree_runner, "no_bound_drafts", lambda *args: None),
            (tree_runner, "not_in_schedulers_process", lambda *args: None),
            (sampler, "gumbel_sample", on_values(gumbel_on_cpu.gumbel_sample)),
            (states, "apply_temperature", on_values(gumbel_on_cpu.apply_temperature)),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        yield


class _Driver:
    """Schedules requests, and calls a runner in the order in which the engine does."""

    def __init__(self, options: dict[str, Any], weights: Weights, gpu: Gpu | None) -> None:
        self._gpu, self._weights = gpu, weights
        device = torch.device("cpu" if gpu is None else "cuda")
        self._nodes = METHOD.parse(options).num_draft_tokens
        runner = self._runner = _Runner(device, self._nodes)
        runner.set_up(METHOD, options)
        runner.warmed_up()
        self._cache = torch.full((MAX_REQUESTS * MAX_LEN // BLOCK, 1, BLOCK, 1), -1.0).to(device)
        runner._movers = [movers_of([self._cache])]
        self._texts: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._free = list(range(MAX_REQUESTS))

    def run(self, asked: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Serve requests until all have finished, and tell what came of it."""
        waiting, found, steps, step = dict(asked), {}, [], 0
        while waiting or self._texts:
            arrived = [name for name, each in waiting.items() if each["starts"] <= step]
            new = {name: waiting.pop(name) for name in arrived}
            recording = nullcontext(Record()) if self._gpu is None else self._gpu.recording()
            with recording as record:
                drafted = self._step(new, asked, found)
            steps.append([drafted, record.totals(), record.report()])
            step += 1
            assert step < 200, "the requests do not finish"
        return {
            "texts": found,
            "counts": self._runner.counters.as_dict(),
            "acceptance": self._runner.acceptance(),
            "steps": steps,
        }

    def _unwatched(self) -> Any:
        return nullcontext() if self._gpu is None else self._gpu.unwatched()

    def _without_waiting(self) -> Any:
        return nullcontext() if self._gpu is None else self._gpu.no_waiting()

    def _step(self, new: dict[str, Any], asked: dict[str, Any], found: dict[str, list[int]]) -> int:
        """One step; returns the number of requests with drafts."""
        runner = self._runner
        drafts: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        for name, each in new.items():
            # A request's blocks are adjacent.
            first = self._free.pop(0) * MAX_LEN // BLOCK
            self._blocks[name] = [*range(first, first + MAX_LEN // BLOCK)]
            self._texts[name], self._computed[name] = [*each["prompt"]], 0
        for name, text in self._texts.items():
            unread = len(text) - self._computed[name]
            counts[name] = min(unread, CHUNK)
            if name not in new and len(text) > len(asked[name]["prompt"]):
                drafts[name] = [-1] * self._nodes
                counts[name] += self._nodes
        output = self._scheduled(new, counts, drafts)
        with self._unwatched():
            runner.add_requests(output)
            for name in counts:
                row = runner.req_states.req_id_to_index[name]
                runner.req_states.num_computed_tokens_np[row] = self._computed[name]
            runner.update_requests(output)
            runner.block_tables.apply_staged_writes()
            state, _ = runner.gather_batch_req_state(output, dummy_run=False)
            described = SimpleNamespace(num_tokens=sum(counts.values()), num_reqs=None)
            batch = runner.prepare_inputs(output, state, described, 0)
        with self._without_waiting():
            _, slots = runner.prepare_attn(batch)
        logits = self._forward(batch, slots)
        with self._without_waiting():
            sampled, num_sampled, num_rejected = runner.sample(logits, batch, None)
        with self._unwatched():
            runner.postprocess_sampled(
                *(batch.idx_mapping, sampled.sampled_token_ids, num_sampled, num_rejected),
                batch.query_start_loc,
            )
        with self._without_waiting():
            proposed = self._propose(batch, num_sampled, num_rejected)
        with self._unwatched():
            runner.req_states.draft_tokens[batch.idx_mapping] = proposed
        tokens = held(sampled.sampled_token_ids).tolist()
        for row, (name, count) in enumerate(
            zip(batch.req_ids, held(num_sampled).tolist(), strict=True)
        ):
            self._advance(name, tokens[row][:count], counts, asked, found)
        return len(drafts)

    def _scheduled(
        self, new: dict[str, Any], counts: dict[str, int], drafts: dict[str, list[int]]
    ) -> Any:
        requests = [
            SimpleNamespace(
                req_id=name,
                prompt_len=len(each["prompt"]),
                prompt_token_ids=each["prompt"],
                prefill_token_ids=each["prompt"],
                num_computed_tokens=0,
                sampling_params=SamplingParams(max_tokens=each["length"], **each["parameters"]),
                block_ids=(self._blocks[name],),
                lora_request=None,
            )
            for name, each in new.items()
        ]
        old = [name for name in counts if name not in new]
        return SimpleNamespace(
            scheduled_new_reqs=requests,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old,
                num_computed_tokens=[self._computed[name] for name in old],
                new_block_ids=[None] * len(old),
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=drafts,
            has_structured_output_requests=False,
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
        )

    def _propose(self, batch: Any, num_sampled: Any, num_rejected: Any) -> torch.Tensor:
        runner = self._runner
        return runner.speculator.propose(
            *(batch, None, None, None, None, num_sampled, num_rejected),
            runner.req_states.last_sampled_tokens,
            num_speculative_tokens=self._nodes,
        )

    def _forward(self, batch: Any, slots: torch.Tensor) -> torch.Tensor:
        """The target's logits of all rows of a step, whose KV is written."""
        count = batch.num_tokens
        tokens = held(batch.input_ids)[:count]
        held(self._cache).view(-1)[held(slots)[0][:count]] = tokens.float()
        logits = self._weights.logits(tokens, held(batch.positions)[:count])
        return logits if self._gpu is None else DeviceTensor(logits, self._gpu)

    def _advance(
        self,
        name: str,
        tokens: list[int],
        counts: dict[str, int],
        asked: dict[str, Any],
        found: dict[str, list[int]],
    ) -> None:
        """Append tokens to a request's text; it ends when it has enough."""
        text, prompt = self._texts[name], asked[name]["prompt"]
        decodes = len(text) > len(prompt)
        text += tokens
        self._computed[name] = len(text) - 1 if decodes else self._computed[name] + counts[name]
        first = self._blocks[name][0] * BLOCK
        cached = held(self._cache).view(-1)[first : first + self._computed[name]].tolist()
        assert cached == text[: self._computed[name]], f"the KV of {name} is not that of its text"
        if len(text) - len(prompt) >= asked[name]["length"]:
            found[name] = text[len(prompt) :][: asked[name]["length"]]
            with self._unwatched():
                self._runner._remove_request(name)
            self._free.append(first // MAX_LEN)
            for kept in (self._texts, self._computed, self._blocks):
                del kept[name]


def decode(options: dict[str, Any], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """Decode requests on the CPU and on a fake GPU, and tell what came of both."""
    weights = Weights()
    sizes = ((9, 14, 0), (6, 12, 0), (13, 5, 6))
    asked = {
        f"request {number}": {
            "prompt": np.random.default_rng(number).integers(VOCAB, size=length).tolist(),
            "length": tokens,
            "parameters": given,
            "starts": starts,
        }
        for number, ((length, tokens, starts), given) in enumerate(
            zip(sizes, parameters, strict=False)
        )
    }
    plain = {
        name: weights.plain_text(each["prompt"], each["length"]) for name, each in asked.items()
    }
    with torch.inference_mode():
        with _on(None):
            on_cpu = _Driver(options, weights, None).run(asked)
        with fake_gpu() as gpu, _on(gpu):
            on_gpu = _Driver(options, weights, gpu).run(asked)
    return {"plain": plain, "cpu": on_cpu, "gpu": on_gpu}
