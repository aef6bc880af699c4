"""What vLLM's own V1 model runner does in a step, as far as drafting depends on it.

The target's logits follow from the last token, and the KV of a token is the token, so that a text
can be read in the cache.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from drafttree.transfer import on_device
from fake_gpu.stand_ins import (
    BLOCK,
    BUDGET,
    MAX_LEN,
    MAX_REQUESTS,
    TARGET,
    VOCAB,
    context_of_step,
    groups_of,
    new_cache,
)


class Model(torch.nn.Module):
    """The target, which the engine calls as a module, and compiles."""

    do_not_compile = False

    def __init__(self, runner: Stock) -> None:
        super().__init__()
        self._runner = runner

    def embed_input_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the target says after the tokens, `[N, V]`."""
        with self._runner.uncounted():
            return self._runner.weights[tokens.long()]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states are logits."""
        return hidden

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The logits of all rows, `[T, V]`."""
        return self.embed_input_ids(input_ids)


class Stock(GPUModelRunner):
    """The engine's runner, without its models.

    Args:
        weights: The target's logits after each token, `[V, V]`.
        device: Where everything is.

    Attributes:
        caches: The KV caches of all layers, by name.
        drafting_layer: Name of the layer that drafts; None for none.
        attended: Rows whose KV was written, of each forward of the layer that replayed no graph.
        graphs: Number of graphs of the layer that were captured.
    """

    drafting_layer: str | None = None
    attended: list[int]
    graphs: int

    def __init__(self, weights: torch.Tensor, device: torch.device) -> None:
        self.device, self.weights = device, weights.to(device)
        self.max_num_reqs, self.max_model_len = MAX_REQUESTS, MAX_LEN
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=BUDGET, max_num_scheduled_tokens=None, scheduler_cls=None
        )
        self.lora_config = None
        self.supports_mm_inputs = self.uses_mrope = False
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: VOCAB,
            get_hidden_size=lambda: VOCAB,
            dtype=torch.float32,
            model="none",
            seed=0,
        )
        self.parallel_config = SimpleNamespace(
            data_parallel_index=0, world_size=1, distributed_executor_backend="uni"
        )
        self.vllm_config = SimpleNamespace(
            cache_config=None,
            model_config=self.model_config,
            reasoning_config=None,
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=BUDGET),
            use_cumem_cudagraph_pool=False,
            parallel_config=self.parallel_config,
        )
        self.load_config, self.model_memory_usage = None, 0
        self.rejection_sampler: Any = None
        self.requests: dict[str, CachedRequestState] = {}
        self.sampler = Sampler()
        # vLLM for CPUs would take an operator of its own.
        draw = self.sampler.topk_topp_sampler
        draw.forward = draw.forward_native
        self.attn_groups: list[Any] = []
        self._draft_token_ids: Any = None
        self.discard_request_mask = SimpleNamespace(np=np.zeros(MAX_REQUESTS, np.bool_))
        bounds = torch.zeros(MAX_REQUESTS + 1, dtype=torch.int32)
        self.query_start_loc = SimpleNamespace(np=bounds.numpy(), gpu=bounds.to(device))
        self.input_batch = InputBatch(
            MAX_REQUESTS, MAX_LEN, BUDGET, device, VOCAB, [BLOCK], [MAX_LEN // BLOCK]
        )
        self.input_ids = SimpleNamespace(gpu=torch.zeros(BUDGET, dtype=torch.int32, device=device))
        self.positions = torch.zeros(BUDGET, dtype=torch.int64, device=device)
        self.caches = {TARGET: new_cache(device)}
        self.uncounted: Any = nullcontext
        self.model = Model(self)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """The KV caches are there."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The target needs none."""
        if self.drafting_layer is not None:
            self.attn_groups = groups_of(self.drafting_layer, self.device, self.num_spec_tokens)

    def get_model(self) -> Any:
        """The target."""
        return self.model

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
        for row, name in enumerate(self.input_batch.req_ids):
            computed = self.requests[name].num_computed_tokens
            self.input_batch.num_computed_tokens_cpu[row] = computed

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
            self.query_start_loc.np[row + 1] = len(ids)
        with self.uncounted():
            mapping = batch.block_table.block_tables[0].slot_mapping.gpu
            for target, values in (
                (self.input_ids.gpu, np.array(ids, np.int32)),
                (self.positions, np.array(positions)),
                (mapping, np.array(slots)),
                (self.query_start_loc.gpu, self.query_start_loc.np.copy()),
            ):
                target[: len(values)] = on_device(values, self.device)
            of_logits = on_device(np.array(rows), self.device)
        return of_logits, None

    def forward_step(self, num_scheduled: np.ndarray[Any, Any]) -> torch.Tensor:
        """Run a step whose inputs are prepared; returns the target's hidden states, `[T, V]`."""
        self._show_masks(self._step)  # type: ignore[attr-defined]
        bounds = self.query_start_loc.np[: len(num_scheduled) + 1].copy()
        computed = self.input_batch.num_computed_tokens_cpu[: len(num_scheduled)]
        lengths = (computed + num_scheduled).astype(np.int32)
        tokens = int(num_scheduled.sum())
        table = self.input_batch.block_table.block_tables[0]
        with self.uncounted():
            common = CommonAttentionMetadata(
                query_start_loc=on_device(bounds, self.device),
                query_start_loc_cpu=torch.from_numpy(bounds),
                seq_lens=on_device(lengths, self.device),
                num_reqs=len(lengths),
                num_actual_tokens=tokens,
                max_query_len=int(num_scheduled.max()),
                max_seq_len=int(lengths.max()),
                block_table_tensor=table.get_device_tensor(len(lengths)),
                slot_mapping=table.slot_mapping.gpu[:tokens],
            )
        with context_of_step(self.attn_groups, common):
            hidden: torch.Tensor = self._model_forward(
                self.input_ids.gpu[:tokens], self.positions[:tokens]
            )
        return hidden

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.uncounted():
            mapping = self.input_batch.block_table.block_tables[0].slot_mapping.gpu
            self.caches[TARGET].view(-1)[mapping[: len(input_ids)]] = input_ids.float()
        logits: torch.Tensor = self.model(input_ids, *args)
        return logits

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the engine was given."""
        ids, self._draft_token_ids = self._draft_token_ids, None
        return None if ids is None else DraftTokenIds(list(self.input_batch.req_ids), ids)

    # What the tests read.

    def text_of(self, name: str) -> tuple[list[int], int]:
        """A request's tokens, and how many of them the target has read."""
        request = self.requests[name]
        text = [*request.prompt_token_ids, *request.output_token_ids]
        return text, min(request.num_computed_tokens, len(text))

    def cached(self, layer: str, name: str, count: int) -> list[float]:
        """What a layer's cache holds of a request's first tokens."""
        first = self.requests[name].block_ids[0][0] * BLOCK
        with self.uncounted():
            values: list[float] = self.caches[layer].view(-1)[first : first + count].tolist()
        return values

    def check_cache(self, name: str) -> None:
        """Check that the KV of a request's text is in its slots, in order."""
        text, computed = self.text_of(name)
        assert self.cached(TARGET, name, computed) == text[:computed]
