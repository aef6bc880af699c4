"""The parts of SGLang's engine that a step needs, on the CPU or on a fake GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from sglang.srt.constrained import xgrammar_backend
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.layers import sampler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.runtime_context import get_context, get_parallel
from xgrammar import apply_token_bitmask_inplace

from drafttree.sglang import plugin, worker
from drafttree.sglang.options import VARIABLE
from fake_gpu.tensors import DeviceTensor, Gpu, held

if TYPE_CHECKING:
    from fake_gpu.sglang_hosts import Host

MAX_REQUESTS = 4
MAX_LEN = 96
KV_SLOTS = 1500
ONE_RANK = SimpleNamespace(world_size=1, rank_in_group=0, device_group=None, barrier=lambda: None)


@contextmanager
def configured(
    host: Host,
    options: dict[str, Any],
    gpu: Gpu | None,
    *,
    seeded: bool,
    group: Any = ONE_RANK,
    **settings: Any,
) -> Iterator[None]:
    """The configuration of an engine.

    Args:
        host: The worker and its method.
        options: The method's options.
        gpu: The fake GPU; None for the CPU.
        seeded: Whether the engine samples by seeds.
        group: The tensor-parallel ranks that the worker knows of.
        settings: Further arguments of the engine.
    """
    plugin.register()
    arguments: dict[str, Any] = {
        "speculative_algorithm": host.algorithm,
        "speculative_draft_model_path": host.draft_model,
        "speculative_num_draft_tokens": host.num_draft_tokens(options) + 1,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "page_size": 1,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "enable_deterministic_inference": seeded,
        **settings,
    }
    with ExitStack() as stack:
        for context in (
            mock.patch.dict(os.environ, {VARIABLE: json.dumps(options)}),
            get_context().override_server_args(**arguments),
            get_parallel().override(tp_group=ONE_RANK, tp_rank=0),
            mock.patch.object(worker, "get_tp_group", return_value=group),
            # The engine's own operators are compiled for one device or the other.
            mock.patch.object(allocation, "assign_req_to_token_pool_func", _assign_slots),
            mock.patch.object(sampler, "multinomial_with_seed", _drawn_by_seed),
            mock.patch.object(sampler.Sampler, "_sync_token_ids_across_tp"),
            _masks_applied_on(gpu),
        ):
            stack.enter_context(context)
        yield


@contextmanager
def _masks_applied_on(gpu: Gpu | None) -> Iterator[None]:
    """In place of the engine's own kernel, which the interpreter does not run."""

    def apply(logits: torch.Tensor, masks: torch.Tensor) -> None:
        assert gpu is not None
        gpu.record.launched("apply_token_bitmask")
        apply_token_bitmask_inplace(held(logits), held(masks), backend="cpu")

    with mock.patch.object(xgrammar_backend, "apply_token_bitmask_inplace_triton", apply):
        yield


def _drawn_by_seed(
    logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A token of each row, `int64 [R, 1]`, that follows from its seed and position."""
    noise = [
        torch.rand(logprobs.shape[1], generator=torch.Generator().manual_seed(1000 * seed + place))
        for seed, place in zip(held(seeds).tolist(), held(positions).tolist(), strict=True)
    ]
    tokens = (held(logprobs) - (-torch.stack(noise).log()).log()).argmax(1, keepdim=True)
    return DeviceTensor(tokens, logprobs.gpu) if isinstance(logprobs, DeviceTensor) else tokens


def _assign_slots(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    count: int,
) -> None:
    """Write new KV slots to the rows of the slot table."""
    first = 0
    for row, start, end in zip(
        *(held(each).tolist() for each in (rows, starts, ends)), strict=True
    ):
        held(table)[row, start:end] = held(slots)[first : first + end - start].int()
        first += end - start


def new_cache(device: str) -> MHATokenToKVPool:
    """A KV cache of one layer with one head of one number."""
    return MHATokenToKVPool(
        KV_SLOTS, 1, torch.float32, 1, 1, 1, device, False, enable_alt_stream=False
    )


@dataclass(frozen=True)
class Pools:
    """The engine's memory.

    Attributes:
        rows: The slot table, of a row for each running request.
        slots: The allocator of KV slots, which has the KV cache.
        prefixes: The cache of prefixes.
    """

    rows: ReqToTokenPool
    slots: TokenToKVPoolAllocator
    prefixes: RadixCache

    @classmethod
    def on(cls, device: str) -> Pools:
        """Empty pools."""
        length = MAX_LEN + get_alloc_reserve_per_decode()
        rows = ReqToTokenPool(MAX_REQUESTS, length, device, False)
        cache = new_cache(device)
        slots = TokenToKVPoolAllocator(KV_SLOTS, torch.float32, device, cache, False)
        return cls(rows, slots, RadixCache(CacheInitParams(False, rows, slots, page_size=1)))


def result_processor(
    pools: Pools, config: Any, made: Any, *, overlap: bool
) -> SchedulerBatchResultProcessor:
    """What reads a step's results on the host.

    Args:
        pools: The engine's memory.
        config: The target's configuration.
        made: The worker.
        overlap: Whether a step is launched before the last one's results are read.
    """
    ignored = _Reporter()
    return SchedulerBatchResultProcessor(
        is_generation=True,
        disaggregation_mode=DisaggregationMode.NULL,
        enable_overlap=overlap,
        enable_overlap_mlx=False,
        model_config=config,
        token_to_kv_pool_allocator=pools.slots,
        tree_cache=pools.prefixes,
        hisparse_coordinator=None,
        req_to_token_pool=pools.rows,
        decode_offload_manager=None,
        metrics_collector=ignored,
        metrics_reporter=ignored,
        draft_worker=made,
        model_worker=made,
        logprob_result_processor=ignored,
        output_streamer=ignored,
        beam_coordinator=ignored,
        abort_request=ignored,
    )


class _Reporter:
    """In place of what the engine reports metrics and sends answers with."""

    num_generated_tokens = forward_ct_decode = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None
