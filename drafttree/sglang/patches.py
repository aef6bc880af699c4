"""Everything that drafttree replaces in SGLang; `PATCHES` lists it. Importing this needs no engine.

Each function first checks that what it replaces is what it knows, and does nothing if it was called
before. The replacements do what SGLang does for every server that runs no method of ours, so
several engines may share one process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drafttree.patches import Patch
from drafttree.sglang.versions import CPU_BACKEND, unknown

if TYPE_CHECKING:
    import torch

COUNTERS_KEY = "drafttree"
"""Where `Engine.get_server_info()["internal_states"]` holds the counters."""

AT_REGISTRATION = "at registration; changes nothing for servers without a method of ours"
WITH_A_WORKER = "when a method's worker is made, before the memory pools"

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS",
        when=AT_REGISTRATION,
        reason="SGLang's attention backend for CPUs has no branch for the verification of trees.",
    ),
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.get_internal_state",
        when=WITH_A_WORKER,
        reason="SGLang has no place where a plugin reports counters.",
    ),
    Patch(
        target="sglang.srt.mem_cache.kv_cache_configurator:get_req_to_token_extra_context_len",
        when=WITH_A_WORKER,
        reason="SGLang reserves KV slots of two trees beyond a request's tokens, but with pages of "
        "one token it makes the rows of its slot table longer by one tree only, and then writes "
        "beyond a row's end.",
    ),
    Patch(
        target="sglang.srt.model_executor.pool_configurator:"
        "DefaultPoolConfigurator._compute_cell_size",
        when=f"{WITH_A_WORKER}, for methods that read hidden states",
        reason="The KV of the drafter's layer stands in the slots of the target's pool, and must "
        "be counted when the pool is sized.",
    ),
    Patch(
        target="sglang.srt.mem_cache.kv_cache_builder:create_tree_cache",
        when=f"{WITH_A_WORKER}, for methods that read hidden states",
        reason="The drafter's layer stores at each position what it read of the next token too, so "
        "a cached prefix holds only where the token after it is the same.",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner:ModelRunner.sample",
        when=f"{WITH_A_WORKER}, on the target's runner alone, for model-free methods",
        reason="Sampling overwrites a prompt's logits, so the drafter must read them before it.",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner:ModelRunner.sampler",
        when=f"{WITH_A_WORKER}, on the target's runner alone, for methods with a draft model",
        reason="An acceptance rule chooses tokens where SGLang would draw them.",
    ),
)

_MARK = "_drafttree"
"""Attribute of our replacements."""


def _is_replaced(function: Any) -> bool:
    return hasattr(function, _MARK)


def _check_parameters(name: str, function: Any, expected: list[str]) -> None:
    found = list(inspect.signature(function).parameters)
    if found != expected:
        raise unknown(f"{name} takes {found}, expected {expected}")


def _method_reads_hidden_states(algorithm: Any) -> bool:
    from drafttree.sglang.algorithm import TreeAlgorithm

    return isinstance(algorithm, TreeAlgorithm) and algorithm.method.kind.needs_hidden_states


def route_attention() -> None:
    """Give servers that run a method of ours on a CPU attention that honours tree masks.

    Raises:
        RuntimeError: This is not the SGLang that we know.
    """
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    stock = ATTENTION_BACKENDS.get(CPU_BACKEND)
    if _is_replaced(stock):
        return
    if stock is None or len(inspect.signature(stock).parameters) != 1:
        raise unknown(f"no attention backend {CPU_BACKEND} is made from a model runner alone")

    def backend_for(runner: Any) -> Any:
        from drafttree.sglang.algorithm import TreeAlgorithm

        if not isinstance(runner.spec_algorithm, TreeAlgorithm):
            return stock(runner)
        from drafttree.sglang.attention import TreeAttentionBackend

        return TreeAttentionBackend(runner)

    setattr(backend_for, _MARK, True)
    register_attention_backend(CPU_BACKEND)(backend_for)


def report_counters() -> None:
    """Add the counters of a tree method's worker to what its scheduler reports of itself.

    Raises:
        RuntimeError: This is not the SGLang that we know.
    """
    from sglang.srt.managers.scheduler import Scheduler

    from drafttree.metrics import Counters

    stock = Scheduler.get_internal_state
    if _is_replaced(stock):
        return
    _check_parameters("Scheduler.get_internal_state", stock, ["self", "recv_req"])

    @functools.wraps(stock)
    def get_internal_state(self: Any, recv_req: Any) -> Any:
        answer = stock(self, recv_req)
        counters = getattr(self.draft_worker, "counters", None)
        if isinstance(counters, Counters):
            answer.internal_state[COUNTERS_KEY] = counters.as_dict()
        return answer

    setattr(get_internal_state, _MARK, True)
    Scheduler.get_internal_state = get_internal_state


def widen_request_rows() -> None:
    """Make rows of the slot table as long as the slots reserved during verification need.

    Raises:
        RuntimeError: This is not the SGLang that we know.
    """
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    stock = getattr(kv_cache_configurator, "get_req_to_token_extra_context_len", None)
    if _is_replaced(stock):
        return
    if stock is None:
        raise unknown("kv_cache_configurator has no get_req_to_token_extra_context_len")

    # Its arguments differ between the supported versions; both functions take the same.
    @functools.wraps(stock)
    def get_req_to_token_extra_context_len(*given: Any) -> int:
        extra = int(stock(*given))
        algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
        if isinstance(algorithm, TreeAlgorithm):
            return max(extra, get_alloc_reserve_per_decode(*given))
        return extra

    setattr(get_req_to_token_extra_context_len, _MARK, True)
    kv_cache_configurator.get_req_to_token_extra_context_len = get_req_to_token_extra_context_len


def count_layer_memory() -> None:
    """Count one more layer when the KV pool of a target whose hidden states are read is sized.

    Raises:
        RuntimeError: This is not the SGLang that we know.
    """
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    stock = getattr(DefaultPoolConfigurator, "_compute_cell_size", None)
    if _is_replaced(stock):
        return
    if stock is None:
        raise unknown("DefaultPoolConfigurator has no _compute_cell_size")
    name = "DefaultPoolConfigurator._compute_cell_size"
    _check_parameters(name, stock, ["self", "kvc", "num_layers"])

    @functools.wraps(stock)
    def _compute_cell_size(self: Any, kvc: Any, num_layers: int) -> int:
        added = _method_reads_hidden_states(kvc.spec_algorithm)
        return int(stock(self, kvc, num_layers + added))

    setattr(_compute_cell_size, _MARK, True)
    DefaultPoolConfigurator._compute_cell_size = _compute_cell_size


def match_prefixes_by_bigrams() -> None:
    """Have the radix cache match bigrams, as for SGLang's own EAGLE, where hidden states are read.

    Raises:
        RuntimeError: This is not the SGLang that we know.
    """
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    stock = getattr(kv_cache_builder, "create_tree_cache", None)
    if _is_replaced(stock):
        return
    if stock is None or "is_eagle" not in CacheInitParams.__dataclass_fields__:
        raise unknown("its radix cache does not match bigrams of tokens")
    _check_parameters("create_tree_cache", stock, ["ctx"])

    @functools.wraps(stock)
    def create_tree_cache(ctx: Any) -> Any:
        if _method_reads_hidden_states(ctx.tp_worker.model_runner.spec_algorithm):
            ctx.params.is_eagle = True
        return stock(ctx)

    setattr(create_tree_cache, _MARK, True)
    kv_cache_builder.create_tree_cache = create_tree_cache


def observe_prefill(runner: Any, observe: Callable[[Any, torch.Tensor], None]) -> None:
    """Show a prefill's logits to a drafter before the host samples from them.

    Args:
        runner: The target's model runner; other runners are left alone.
        observe: Called with the forward batch and the raw logits `[B, V]` after each prefill. A
            second call replaces it.

    Raises:
        RuntimeError: This is not the SGLang that we know.
    """
    stock = runner.sample
    if not _is_replaced(stock):
        _check_parameters("ModelRunner.sample", stock, ["logits_output", "forward_batch"])

        @functools.wraps(stock)
        def sample(logits_output: Any, forward_batch: Any) -> torch.Tensor:
            if forward_batch.forward_mode.is_extend_without_speculative():
                getattr(sample, _MARK)(forward_batch, logits_output.next_token_logits)
            tokens: torch.Tensor = stock(logits_output, forward_batch)
            return tokens

        runner.sample = sample
    setattr(runner.sample, _MARK, observe)


def install_acceptance_sampler(runner: Any) -> None:
    """Give the target's model runner a sampler that an acceptance rule can take over.

    Raises:
        RuntimeError: This is not the SGLang that we know.
    """
    from sglang.srt.layers.sampler import Sampler

    from drafttree.sglang.acceptance_sampler import AcceptanceSampler

    if isinstance(runner.sampler, AcceptanceSampler):
        return
    if type(runner.sampler) is not Sampler:
        raise unknown(f"the model runner's sampler is a {type(runner.sampler).__name__}")
    parameters = ["self", "probs", "sampling_info", "positions", "simple_sampling_case"]
    _check_parameters("Sampler._sample_from_probs", Sampler._sample_from_probs, parameters)
    runner.sampler = AcceptanceSampler()
