"""A target whose verifications are SGLang's own CUDA graphs, on a fake GPU.

The graph runners, their buffers and what chooses between them and other forwards are the engine's
own. Model and attention stand in for its own, and are captured with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor import input_buffers
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from drafttree.sglang.graphs import requests as request_graphs
from fake_gpu.graphs import cuda_graphs
from fake_gpu.sglang_engine import MAX_LEN
from fake_gpu.sglang_target import DraftWorker, Model, TargetWorker, Weights
from fake_gpu.tensors import Gpu, held


class _TreeAttention(AttentionBackend):
    """Attention for trees of the one size that was configured when it was made."""

    dllm_attention = None

    def __init__(self, runner: GraphModelRunner) -> None:
        self._runner = runner
        self.rows = get_spec().speculative_num_draft_tokens

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        assert max_num_tokens == max_bs * self.rows
        device = self._runner.device
        self._slots = torch.zeros(max_bs, MAX_LEN, dtype=torch.int64, device=device)
        self._seen = torch.zeros(max_bs, MAX_LEN, dtype=torch.int64, device=device)
        self._masks = torch.zeros(max_bs, self.rows, self.rows, dtype=torch.int64, device=device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that a batch is padded with."""
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Before a replay, as in backends that lay their metadata out beforehand."""
        return SharedReadEnds.PRE_REPLAY

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Lay out the slots of the contexts, and the trees' masks."""
        size = forward_batch.batch_size
        assert forward_batch.spec_info.draft_token_num == self.rows, (
            "made for trees of another size"
        )
        lengths = held(forward_batch.seq_lens)[:size].tolist()
        table = held(self._runner.req_to_token_pool.req_to_token)
        rows = held(forward_batch.req_pool_indices)[:size].tolist()
        held(self._seen).zero_()
        held(self._masks).zero_()
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            held(self._slots)[index] = table[row, :MAX_LEN]
            held(self._seen)[index, :length] = 1
        if in_capture:
            return
        masks, first = held(forward_batch.spec_info.custom_mask), 0
        for index, length in enumerate(lengths[: size - forward_batch.num_padding]):
            whole = masks[first : first + self.rows * (length + self.rows)].view(self.rows, -1)
            assert whole[:, :length].all()
            held(self._masks)[index] = whole[:, length:]
            first += whole.numel()

    def totals(self, batch: ForwardBatch) -> torch.Tensor:
        """The sums of the tokens that each node sees, `int64 [R]`."""
        size = batch.batch_size
        tokens = self._runner.cache[self._slots[:size]].long()
        contexts = (tokens * self._seen[:size]).sum(1)
        nodes = batch.input_ids.view(size, self.rows)
        return (contexts[:, None] + (self._masks[:size] * nodes[:, None]).sum(2)).flatten()

    def forward_decode(self, *given: Any, **named: Any) -> Any:
        """Not asked for."""
        raise NotImplementedError

    forward_extend = forward_decode  # type: ignore[assignment]


class _GraphModel(Model):
    """The target's model, which asks the engine's current attention backend."""

    shared_experts_config = None

    def __init__(self, weights: Weights, runner: GraphModelRunner, device: str) -> None:
        self._runner = runner
        self._after, self._shifts = (each.to(device) for each in (weights.after, weights.shifts))
        super().__init__(self._after)

    def modules(self) -> list[Any]:
        """Those that a worker looks for, without kernels that could be tuned."""
        return [self.logits_processor]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        """Logits after each row, and as hidden states if these are asked for."""
        self._runner.cache[batch.out_cache_loc] = tokens.float()
        totals = positions + get_attn_backend().totals(batch)
        logits = self._after[tokens] + self._shifts[totals % self._shifts.shape[0]]
        output = batch.next_token_logits_buffer
        output.copy_(self.logits(logits))
        hidden = logits if batch.capture_hidden_mode.is_full() else None
        return LogitsProcessorOutput(next_token_logits=output, hidden_states=hidden)


class GraphModelRunner:
    """As much of the engine's model runner as its graphs and a worker read.

    Args:
        stock: The model runner of a target without graphs.
        weights: The target's logits.
        pools: The engine's slot table and its allocator.
        is_draft_worker: Whether this is a draft model.
    """

    def __init__(
        self, stock: Any, weights: Weights, pools: Any, *, is_draft_worker: bool = False
    ) -> None:
        vars(self).update(vars(stock))
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pools
        self.server_args.dllm_algorithm = None
        self.gpu_id, self.page_size, self.is_draft_worker = 0, 1, is_draft_worker
        self.model_config.hf_config = SimpleNamespace()
        self.model_config.dtype, self.model_config.quantization = torch.float32, None
        self.lora_manager = self.hisparse_coordinator = self.canary_manager = None
        self.device_timer = None
        self.capture_head_hooks: list[Any] = []
        self.capture_tail_hooks: list[Any] = []
        self.ngram_embedding_manager.enabled = False
        self.kv_index_translator = SimpleNamespace(
            bind_runner_slots=_bind_plan, bind_own_plan=_bind_plan
        )
        self._kernel_warmed_up = True
        self.spec_algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
        self.model = _GraphModel(weights, self, self.device)
        self.replayed: list[tuple[int, int]] = []

    decode_num_tokens_per_req = ModelRunner.decode_num_tokens_per_req
    decode_graph_gather_requirements = ModelRunner.decode_graph_gather_requirements
    max_decode_logits_rows = ModelRunner.max_decode_logits_rows
    max_shared_logits_buffer_rows = ModelRunner.max_shared_logits_buffer_rows

    def _decode_cuda_graph_runner_cls(self) -> Any:
        return DecodeCudaGraphRunner

    def _get_attention_backend(self) -> _TreeAttention:
        return _TreeAttention(self)

    def get_pp_proxy_topk_size(self) -> None:
        """None: there is one stage."""

    get_pp_proxy_residual_num_blocks = get_pp_proxy_topk_size

    def get_pp_proxy_dspark_hidden_size(self) -> int:
        """0: there is one stage."""
        return 0

    get_aux_hidden_states_width = get_pp_proxy_dspark_hidden_size

    def attn_tp_sequence_sharded(self, num_tokens: int) -> bool:
        """False: there is one rank."""
        return False

    def read_cache(self, cache: Any) -> None:
        """Read keys and values, which are the same, in a KV cache."""
        self.cache, self._values = (each[0].view(-1) for each in (cache.k_buffer, cache.v_buffer))

    def capture(self) -> None:
        """Capture graphs as the engine does."""
        self.graph_shared_output = GraphSharedOutput.create_for_model_runner(self)
        self.decode_cuda_graph_runner = DecodeCudaGraphRunner(self)

    def forward(self, batch: ForwardBatch) -> Any:
        """The engine's choice between its graphs and other forwards, which there are none of."""
        graphs = self.decode_cuda_graph_runner
        assert batch.kv_loc_plan is not None, "its slots in other pools are not known"
        assert graphs.can_run_graph(batch), "there is no graph for this step"
        output = ModelRunner._forward_raw(self, batch, None)  # type: ignore[arg-type]
        self._values.copy_(self.cache)
        self.replayed.append((graphs.captured_req_width, graphs.bs))
        return output


class GraphTarget(TargetWorker):
    """A target that verifies with graphs alone."""

    def __init__(self, weights: Weights, *given: Any) -> None:
        super().__init__(weights, *given)
        stock = self.model_runner
        self.model_runner = GraphModelRunner(stock, weights, self._pools)
        self.model_runner.read_cache(self._cache())
        self.model_runner.sample = stock.sample

    def make_draft_worker(self) -> DraftWorker:
        """The worker of a draft model beside this target."""
        return GraphDraft(self)

    def init_attention_backends(self) -> None:
        """Make the backend of whole trees."""
        self.model_runner.attn_backend = self.model_runner._get_attention_backend()

    def forward_batch_generation(
        self, batch: Any, is_verify: bool = False, capture_hidden_mode: Any = None
    ) -> GenerationBatchResult:
        """Replay a graph, or read prompts."""
        if not is_verify:
            return super().forward_batch_generation(batch, is_verify, capture_hidden_mode)
        return _replay(self, batch, capture_hidden_mode or CaptureHiddenMode.NULL)


class GraphDraft(DraftWorker):
    """A draft model that drafts with graphs alone."""

    def __init__(self, target: TargetWorker) -> None:
        super().__init__(target)
        self.model_runner = GraphModelRunner(
            self.model_runner, self._weights, self._pools, is_draft_worker=True
        )

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Make the KV cache."""
        super().alloc_memory_pool(**pools)
        self.model_runner.read_cache(self._cache())

    def init_attention_backends(self) -> None:
        """Make the backend of whole trees."""
        self.model_runner.attn_backend = self.model_runner._get_attention_backend()

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        """The engine captures no graphs of decode steps, but has a buffer for their logits."""
        assert not capture_decode_cuda_graph
        self.model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(
            self.model_runner
        )
        self.model_runner.decode_cuda_graph_runner = None

    def forward_batch_generation(
        self, batch: Any, is_verify: bool = False, capture_hidden_mode: Any = None
    ) -> GenerationBatchResult:
        """Replay a graph, or read prompts."""
        if batch.spec_info is None:
            return super().forward_batch_generation(batch, is_verify)
        self._requests(batch)  # which are checked
        return _replay(self, batch, CaptureHiddenMode.NULL)


def _bind_plan(batch: Any) -> None:
    """What the engine does to its own batches, without other pools."""
    batch.kv_loc_plan = SimpleNamespace()


def _replay(worker: TargetWorker, batch: Any, mode: CaptureHiddenMode) -> GenerationBatchResult:
    with worker._unwatched():
        lengths = batch.seq_lens.clone()
        of_batch = ForwardBatch(
            forward_mode=batch.forward_mode,
            batch_size=len(lengths),
            input_ids=batch.input_ids,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lengths,
            out_cache_loc=batch.out_cache_loc,
            seq_lens_sum=int(lengths.sum()),
            positions=batch.spec_info.positions,
            spec_info=batch.spec_info,
            seq_lens_cpu=lengths.cpu(),
            capture_hidden_mode=mode,
        )
        worker.model_runner.kv_index_translator.bind_own_plan(of_batch)
        output = worker.model_runner.forward(of_batch)
    return GenerationBatchResult(
        logits_output=output.logits_output, can_run_cuda_graph=output.can_run_graph
    )


def captured(graphs: Any, own: Any) -> dict[int, list[int]]:
    """The numbers of requests with a graph, by the rows of each.

    Args:
        graphs: A worker's `TreeGraphs`; None if there are those of the engine alone.
        own: The engine's.
    """
    runners = [own] if graphs is None else [made for _, made in graphs._captured.values()]
    return {
        made.captured_req_width: sorted(key.size for key in made.backend._graphs)
        for made in runners
    }


@contextmanager
def graphs_for(gpu: Gpu, requests: list[int]) -> Iterator[dict[str, Any]]:
    """Let SGLang's graphs be captured on the fake GPU; yields its settings.

    Args:
        gpu: The fake GPU.
        requests: The numbers of requests for which it captures graphs.
    """
    config = CudaGraphConfig(decode=PhaseConfig(backend=Backend.FULL, bs=requests))

    @contextmanager
    def on_one_stream(stream: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(stream=stream)

    with ExitStack() as stack:
        stack.enter_context(cuda_graphs(gpu))
        stack.enter_context(mock.patch.dict(input_buffers._forward_input_buffer_pool, clear=True))
        for owner, name, value in (
            (decode_cuda_graph_runner, "graph_capture", on_one_stream),
            (request_graphs, "graph_capture", on_one_stream),
            (decode_cuda_graph_runner, "get_or_create_global_graph_capture_stream", lambda: None),
            (GraphSharedOutput, "_process_shared", None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield {"cuda_graph_config": config}
