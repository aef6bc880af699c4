"""What vLLM's own V2 model runner does in a step, as far as drafting depends on it.

Triton's interpreter must be there before vLLM is imported; see `v2_on_cpu`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gumbel_on_cpu
import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import sampler, states
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from drafttree.testing.session import random_weights
from drafttree.vllm.v2 import hidden_state
from drafttree.vllm.v2 import runner as tree_runner
from fake_gpu.stand_ins import (
    BLOCK,
    BUDGET,
    MAX_LEN,
    MAX_REQUESTS,
    ONE_RANK,
    TARGET,
    VOCAB,
    context_of_step,
    groups_of,
    new_cache,
)
from fake_gpu.tensors import DeviceTensor, Gpu, held


class _Ignored:
    """In place of what of the engine does not matter to drafting."""

    num_new_sampled_tokens_per_step = 1
    rope_state = None

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


class Weights:
    """A target whose next token depends on the last one, and a little on its position."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.after = random_weights(VOCAB, generator).log()
        self.shifts = 0.3 * torch.randn(MAX_LEN, VOCAB, generator=generator)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]` after tokens at positions."""
        return self.after[tokens.long()] + self.shifts[positions.clamp(max=MAX_LEN - 1).long()]

    def plain_text(self, prompt: list[int], length: int) -> list[int]:
        """The most likely tokens after a prompt, decoded one by one."""
        text = [*prompt]
        for _ in range(length):
            last = torch.tensor(text[-1:]), torch.tensor([len(text) - 1])
            text.append(int(self.logits(*last).argmax()))
        return text[len(prompt) :]


class Model(torch.nn.Module):
    """The target, which the engine calls as a module, and compiles."""

    do_not_compile = False

    def __init__(self, runner: Stock) -> None:
        super().__init__()
        self._runner = [runner]  # not one of its own modules

    def embed_input_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the target says after the tokens, wherever they are, `[N, V]`."""
        (runner,) = self._runner
        with runner.uncounted():
            return runner.weights[tokens.long()]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states are logits."""
        return hidden

    def forward(self, batch: Any = None, slots: Any = None, **dummy: torch.Tensor) -> Any:
        """The logits of all rows of a step, `[T, V]`, whose KV is written.

        Args:
            batch: The batch; None for one that serves no request.
            slots: KV slots of the rows.
            **dummy: Inputs that serve no request.
        """
        if batch is None:
            return None
        (runner,) = self._runner
        count = batch.num_tokens
        with runner.uncounted():
            tokens = batch.input_ids[:count]
            runner.caches[TARGET].view(-1)[slots[0, :count]] = tokens.float()
            places = batch.positions[:count].clamp(max=MAX_LEN - 1)
            return runner.weights[tokens.long()] + runner.shifts[places.long()]


class Stock(GPUModelRunner):
    """The engine's own runner without a model, as far as drafting depends on it.

    Args:
        weights: The target.
        device: Where everything is.
        num_draft_tokens: Draft tokens of a request in a step.

    Attributes:
        weights: The target's logits after each token, `[V, V]`.
        shifts: What a row's position adds to them, `[MAX_LEN, V]`.
        caches: The KV caches of all layers, by name.
        drafting_layer: Name of the layer that drafts; None for none.
        reads: Rows of each forward of the draft model, and whether graphs were replayed.
        attended: Rows whose KV was written, of each forward of the layer that replayed no graph.
        graphs: Number of graphs of the layer that were captured.
    """

    drafting_layer: str | None = None
    reads: list[tuple[int, bool]]
    attended: list[int]
    graphs: int

    def __init__(self, weights: Weights, device: torch.device, num_draft_tokens: int) -> None:
        self.device, self.vocab_size = device, VOCAB
        self.weights, self.shifts = weights.after.to(device), weights.shifts.to(device)
        self.caches = {TARGET: new_cache(device)}
        self.uncounted: Any = nullcontext
        self.max_num_reqs, self.max_model_len = MAX_REQUESTS, MAX_LEN
        self.num_speculative_steps = num_draft_tokens
        self.decode_query_len = 1 + num_draft_tokens
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=BUDGET, max_num_scheduled_tokens=None, scheduler_cls=None
        )
        self.speculative_config = SimpleNamespace(
            num_speculative_tokens_per_batch_size=[[1, MAX_REQUESTS, num_draft_tokens]]
        )
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: VOCAB,
            get_hidden_size=lambda: VOCAB,
            dtype=torch.float32,
            model="none",
            rswa_window=None,
        )
        self.vllm_config = SimpleNamespace(
            cache_config=None,
            model_config=self.model_config,
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=BUDGET),
            use_cumem_cudagraph_pool=False,
            parallel_config=SimpleNamespace(world_size=1, distributed_executor_backend="uni"),
        )
        self.parallel_config = self.vllm_config.parallel_config
        self.load_config = None
        self.model_memory_usage = 0
        for absent in (
            *("adaptive_verification", "pooling_runner", "encoder_cache", "fast_prefill"),
            *("pcp_manager", "kv_block_zeroer", "speculator", "structured_outputs_worker"),
            *("pp_handler", "lora_config"),
        ):
            setattr(self, absent, None)
        self.use_pp, self.is_last_pp_rank, self.supports_mm_inputs = False, True, False
        self.model_state = self.prompt_logprobs_worker = _Ignored()
        self.lora_state = LoraState(max_num_reqs=MAX_REQUESTS)
        self.model = Model(self)
        self.attn_groups: list[Any] = []
        self.req_states = RequestState(
            MAX_REQUESTS, MAX_LEN, BUDGET, num_draft_tokens, VOCAB, device
        )
        self.input_buffers = InputBuffers(MAX_REQUESTS, BUDGET, device)
        self.kv_cache_config = SimpleNamespace(num_blocks=MAX_REQUESTS * MAX_LEN // BLOCK)
        self.block_tables = BlockTables([BLOCK], MAX_REQUESTS, BUDGET, [MAX_LEN // BLOCK], device)
        self.sampler = Sampler(
            SimpleNamespace(reasoning_config=None, model_config=self.model_config),
            *(MAX_REQUESTS, VOCAB, device, self.req_states),
            num_speculative_tokens=num_draft_tokens,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The target is there."""
        if self.drafting_layer is not None:
            self.attn_groups = groups_of(
                self.drafting_layer, self.device, self.num_speculative_steps
            )

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """The KV caches are there."""

    def forward_step(self, batch: InputBatch, slots: torch.Tensor) -> torch.Tensor:
        """Run a step that is prepared; returns the target's hidden states, `[T, V]`."""
        requests = batch.num_reqs
        bounds = batch.query_start_loc_np[: requests + 1]
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc[: requests + 1],
            query_start_loc_cpu=torch.from_numpy(bounds),
            seq_lens=batch.seq_lens[:requests],
            num_reqs=requests,
            num_actual_tokens=batch.num_tokens,
            max_query_len=int(np.diff(bounds).max()),
            max_seq_len=MAX_LEN,
            block_table_tensor=self.block_tables.input_block_tables[0][:requests],
            slot_mapping=slots[0, : batch.num_tokens],
        )
        with context_of_step(self.attn_groups, common):
            hidden: torch.Tensor = self.model(batch, slots)
        return hidden


@contextmanager
def engine_on(gpu: Gpu | None) -> Iterator[None]:
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
            (hidden_state, "get_tp_group", lambda: ONE_RANK),
            (tree_runner, "no_bound_drafts", lambda *args: None),
            (sampler, "gumbel_sample", on_values(gumbel_on_cpu.gumbel_sample)),
            (states, "apply_temperature", on_values(gumbel_on_cpu.apply_temperature)),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        yield
