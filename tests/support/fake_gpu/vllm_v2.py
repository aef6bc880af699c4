"""Steps of vLLM's V2 model runner with draft trees, on the CPU and on a fake GPU.

Triton's interpreter must be there before vLLM is imported; see `v2_on_cpu`. The states of requests,
the preparation of a step's inputs, sampling and what follows it are the engine's own; the target is
a table of logits, and the steps are called one after another.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import scripted_shapes
import torch
from vllm.sampling_params import SamplingParams

from drafttree.vllm import patches
from fake_gpu.flash import flash_on
from fake_gpu.record import Record
from fake_gpu.session import fake_gpu
from fake_gpu.stand_ins import BLOCK, MAX_LEN, MAX_REQUESTS, VOCAB
from fake_gpu.tensors import Gpu, held
from fake_gpu.vllm_graphs import vllm_graphs
from fake_gpu.vllm_v2_attention import HOSTS as ATTENDING
from fake_gpu.vllm_v2_hosts import HOSTS as BY_METHOD
from fake_gpu.vllm_v2_stock import Weights, engine_on

CHUNK = 5
HOSTS = BY_METHOD | ATTENDING
"""Runners by their method, or by the attention of their target."""


class _Driver:
    """Schedules requests, and calls a runner in the order in which the engine does."""

    def __init__(
        self, method: str, options: dict[str, Any], weights: Weights, gpu: Gpu | None
    ) -> None:
        self._gpu = gpu
        device = torch.device("cpu" if gpu is None else "cuda")
        host = HOSTS[method]
        parsed = host.method.parse(options)
        nodes = parsed.num_draft_tokens
        sizes = [0, *(shape.nodes for shape in parsed.shapes)]
        script = [sizes[index % len(sizes)] for index in scripted_shapes.SCRIPT]
        self._sizes = cycle(script if parsed.shapes else [nodes])
        self._size = next(self._sizes)
        runner = self._runner = host(weights, device, nodes)
        if gpu is not None:
            runner.uncounted = gpu.unwatched
        runner.set_up_host(options)
        self._texts: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._free = list(range(MAX_REQUESTS))
        self._paths: list[Any] = []

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
            "paths": self._paths,
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
            if self._size and name not in new and len(text) > len(asked[name]["prompt"]):
                drafts[name] = [-1] * self._size
                counts[name] += self._size
        self._size = next(self._sizes)
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
            hidden = runner.forward_step(batch, slots)
            sampled, num_sampled, num_rejected = runner.sample(hidden, batch, None)
        with self._unwatched():
            runner.postprocess_sampled(
                *(batch.idx_mapping, sampled.sampled_token_ids, num_sampled, num_rejected),
                batch.query_start_loc,
            )
        with self._without_waiting():
            proposed = self._propose(batch, num_sampled, num_rejected)
        with self._unwatched():
            runner.req_states.draft_tokens[batch.idx_mapping] = proposed
            report = patches.report_of(runner._reports.attach(SimpleNamespace()))
            self._paths.append(report and report.drafts.path.tolist())
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
            num_speculative_tokens=self._size,
        )

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
        first = self._blocks[name][0]
        self._runner.check_cache(name, text[: self._computed[name]], first)
        if len(text) - len(prompt) >= asked[name]["length"]:
            found[name] = text[len(prompt) :][: asked[name]["length"]]
            with self._unwatched():
                self._runner._remove_request(name)
            self._free.append(first * BLOCK // MAX_LEN)
            for kept in (self._texts, self._computed, self._blocks):
                del kept[name]


def decode(
    method: str, options: dict[str, Any], parameters: list[dict[str, Any]]
) -> dict[str, Any]:
    """Decode requests on the CPU and on a fake GPU, and tell what came of both."""
    host = HOSTS[method]
    weights = host.weights_of_target()
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
        with engine_on(None):
            on_cpu = _Driver(method, options, weights, None).run(asked)
        with (
            fake_gpu() as gpu,
            engine_on(gpu),
            flash_on(gpu, host.flash_version),
            vllm_graphs(gpu),
        ):
            on_gpu = _Driver(method, options, weights, gpu).run(asked)
    return {"plain": plain, "cpu": on_cpu, "gpu": on_gpu}
