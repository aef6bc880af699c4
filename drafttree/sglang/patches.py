"""Everything that drafttree replaces in SGLang; `PATCHES` lists it. Importing this needs no engine.

Each function does nothing if it was called before, and otherwise checks that its patch fits the
engine. For servers without a drafttree method the replacements do what SGLang does, so several
engines may share one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from drafttree.patches import (
    Patch,
    check_parameters,
    is_replaced,
    mark_replaced,
    replace_function,
)
from drafttree.sglang.versions import CPU_BACKEND, unknown

if TYPE_CHECKING:
    import torch

COUNTERS_KEY = "drafttree"
"""Key of the counters in `Engine.get_server_info()["internal_states"]`."""

AT_REGISTRATION = "at registration; changes nothing for servers without a drafttree method"
AT_CHECK = "when a server with a method is checked, before it starts its processes"
WITH_A_WORKER = "when a method's worker is made, before the memory pools"

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS",
        when=AT_REGISTRATION,
        reason="SGLang's attention backend for CPUs has no branch for the verification of trees.",
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_control_mixin:get_spec",
        when=AT_CHECK,
        reason="SGLang's front end takes corpora for its own n-gram speculation alone, by name.",
    ),
    Patch(
        target="sglang.srt.arg_groups.lora_hook:check_lora_speculative_compatibility",
        when=AT_CHECK,
        reason="SGLang serves LoRA adapters with its own methods that verify equally many rows for "
        "each request, by name.",
    ),
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.get_internal_state",
        when=WITH_A_WORKER,
        reason="SGLang has no hook through which a plugin could report counters.",
    ),
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.maybe_sleep_on_idle",
        when=f"{WITH_A_WORKER}, for model-free methods",
        reason="SGLang calls it in each round of its loop in which no request is running, and then "
        "looks for requests again. Drafters prime there, one short forward in a round.",
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
        reason="The KV of the drafter's layer uses the slots of the target's pool, so its memory "
        "must be counted when the pool is sized.",
    ),
    Patch(
        target="sglang.srt.mem_cache.kv_cache_builder:create_tree_cache",
        when=f"{WITH_A_WORKER}, for methods that read hidden states",
        reason="The KV of the drafter's layer at each token also depends on the next token, so a "
        "cached prefix is valid only if the token after it is the same.",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner:ModelRunner.sample",
        when=f"{WITH_A_WORKER}, on the target's runner alone, for model-free methods",
        reason="Sampling overwrites a prompt's logits, so the drafter must read them first.",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner:ModelRunner.sampler",
        when=f"{WITH_A_WORKER}, on the target's runner alone, for methods with a draft model",
        reason="An acceptance rule chooses tokens where SGLang would draw them.",
    ),
)


def _method_reads_hidden_states(algorithm: Any) -> bool:
    from drafttree.sglang.algorithm import TreeAlgorithm

    return isinstance(algorithm, TreeAlgorithm) and algorithm.method.kind.needs_hidden_states


def route_attention() -> None:
    """Let servers that run a drafttree method on a CPU use attention that applies tree masks.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    stock = ATTENTION_BACKENDS.get(CPU_BACKEND)
    if is_replaced(stock):
        return
    if stock is None or len(inspect.signature(stock).parameters) != 1:
        raise unknown(f"no attention backend {CPU_BACKEND} is made from a model runner alone")

    def backend_for(runner: Any) -> Any:
        from drafttree.sglang.algorithm import TreeAlgorithm

        if not isinstance(runner.spec_algorithm, TreeAlgorithm):
            return stock(runner)
        from drafttree.sglang.attention import TreeAttentionBackend

        return TreeAttentionBackend(runner)

    mark_replaced(backend_for)
    register_attention_backend(CPU_BACKEND)(backend_for)


def take_corpora() -> None:
    """Let SGLang's front end take corpora for drafttree methods too.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers import tokenizer_control_mixin
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    def wrap(stock: Callable[[], Any]) -> Callable[[], Any]:
        def get_spec() -> Any:
            spec = stock()
            algorithm = SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
            if not isinstance(algorithm, TreeAlgorithm):
                return spec
            # That module reads nothing else of it.
            return SimpleNamespace(
                speculative_algorithm="NGRAM",
                speculative_ngram_external_corpus_max_tokens=(
                    spec.speculative_ngram_external_corpus_max_tokens
                ),
            )

        return get_spec

    replace_function(tokenizer_control_mixin, "get_spec", wrap, expected=[], unknown=unknown)


def accept_adapters() -> None:
    """Let SGLang's check of LoRA adapters pass drafttree methods, which have checks of their own.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.arg_groups import lora_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    def wrap(stock: Callable[[Any], None]) -> Callable[[Any], None]:
        def check_lora_speculative_compatibility(server_args: Any) -> None:
            name = lora_hook.resolving_view(server_args).speculative_algorithm
            if not isinstance(SpeculativeAlgorithm.from_string(name), TreeAlgorithm):
                stock(server_args)

        return check_lora_speculative_compatibility

    replace_function(
        lora_hook,
        "check_lora_speculative_compatibility",
        wrap,
        expected=["server_args"],
        unknown=unknown,
    )


def report_counters() -> None:
    """Add the counters of a tree method's worker to its scheduler's internal state.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers.scheduler import Scheduler

    from drafttree.metrics import Counters

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def get_internal_state(self: Any, recv_req: Any) -> Any:
            answer = stock(self, recv_req)
            counters = getattr(self.draft_worker, "counters", None)
            if isinstance(counters, Counters):
                answer.internal_state[COUNTERS_KEY] = counters.as_dict()
            return answer

        return get_internal_state

    expected = ["self", "recv_req"]
    replace_function(Scheduler, "get_internal_state", wrap, expected=expected, unknown=unknown)


def prime_when_idle() -> None:
    """Let a tree method's worker prime while its scheduler has no request.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers.scheduler import Scheduler

    def wrap(stock: Callable[[Any], None]) -> Callable[[Any], None]:
        def maybe_sleep_on_idle(self: Any) -> None:
            prime = getattr(self.draft_worker, "drafttree_prime", None)
            done, everything = (0, 0) if prime is None else prime(self.tree_cache)
            # Until all is primed the scheduler looks for requests instead of sleeping.
            if done == everything:
                stock(self)

        return maybe_sleep_on_idle

    replace_function(Scheduler, "maybe_sleep_on_idle", wrap, expected=["self"], unknown=unknown)


def widen_request_rows() -> None:
    """Make the rows of the slot table long enough for the slots reserved during verification.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    def wrap(stock: Callable[..., int]) -> Callable[..., int]:
        def get_req_to_token_extra_context_len(*given: Any) -> int:
            extra = int(stock(*given))
            algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
            if isinstance(algorithm, TreeAlgorithm):
                return max(extra, get_alloc_reserve_per_decode(*given))
            return extra

        return get_req_to_token_extra_context_len

    # The arguments differ between the supported versions, but are the same for both functions.
    replace_function(
        kv_cache_configurator,
        "get_req_to_token_extra_context_len",
        wrap,
        expected=None,
        unknown=unknown,
    )


def count_layer_memory() -> None:
    """For methods that read hidden states, size the target's KV pool with one more layer.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    def wrap(stock: Callable[..., int]) -> Callable[..., int]:
        def _compute_cell_size(self: Any, kvc: Any, num_layers: int) -> int:
            added = _method_reads_hidden_states(kvc.spec_algorithm)
            return int(stock(self, kvc, num_layers + added))

        return _compute_cell_size

    expected = ["self", "kvc", "num_layers"]
    replace_function(
        DefaultPoolConfigurator, "_compute_cell_size", wrap, expected=expected, unknown=unknown
    )


def match_prefixes_by_bigrams() -> None:
    """For methods that read hidden states, let the radix cache match bigrams, as for EAGLE.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    if "is_eagle" not in CacheInitParams.__dataclass_fields__:
        raise unknown("its radix cache does not match bigrams of tokens")

    def wrap(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def create_tree_cache(ctx: Any) -> Any:
            if _method_reads_hidden_states(ctx.tp_worker.model_runner.spec_algorithm):
                ctx.params.is_eagle = True
            return stock(ctx)

        return create_tree_cache

    replace_function(kv_cache_builder, "create_tree_cache", wrap, expected=["ctx"], unknown=unknown)


def observe_prefill(runner: Any, observe: Callable[[Any, torch.Tensor], None]) -> None:
    """Pass a prefill's logits to a drafter before SGLang samples from them.

    Args:
        runner: The target's model runner; other runners are left alone.
        observe: Called with the forward batch and the raw logits `[B, V]` after each prefill. It
            replaces the function of an earlier call.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """

    def wrap(stock: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        def sample(logits_output: Any, forward_batch: Any) -> torch.Tensor:
            if forward_batch.forward_mode.is_extend_without_speculative():
                runner.sample.observe(forward_batch, logits_output.next_token_logits)
            return stock(logits_output, forward_batch)

        return sample

    expected = ["logits_output", "forward_batch"]
    replace_function(runner, "sample", wrap, expected=expected, unknown=unknown)
    runner.sample.observe = observe


def install_acceptance_sampler(runner: Any) -> None:
    """Give the target's model runner a sampler that can use an acceptance rule.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.layers.sampler import Sampler

    from drafttree.sglang.acceptance_sampler import AcceptanceSampler

    if isinstance(runner.sampler, AcceptanceSampler):
        return
    if type(runner.sampler) is not Sampler:
        raise unknown(f"the model runner's sampler is a {type(runner.sampler).__name__}")
    parameters = ["self", "probs", "sampling_info", "positions", "simple_sampling_case"]
    name = "Sampler._sample_from_probs"
    check_parameters(name, Sampler._sample_from_probs, parameters, unknown)
    runner.sampler = AcceptanceSampler()
