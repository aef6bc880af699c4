"""Patches of SGLang's KV pools, and of its cache of prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttree.patches import Patch, replace_function
from drafttree.sglang.patches.when import WITH_A_WORKER
from drafttree.sglang.versions import unknown

PATCHES: tuple[Patch, ...] = (
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
        "must be counted when the pool is sized: that of one layer of the target, whole on each "
        "rank of tensor parallelism.",
    ),
    Patch(
        target="sglang.srt.mem_cache.kv_cache_builder:create_tree_cache",
        when=f"{WITH_A_WORKER}, for methods that read hidden states",
        reason="The KV of the drafter's layer at each token also depends on the next token, so a "
        "cached prefix is valid only if the token after it is the same.",
    ),
    Patch(
        target="sglang.srt.session.streaming_session:StreamingSession.try_cache_finished_req",
        when=f"{WITH_A_WORKER}, with `--enable-streaming-session`",
        reason="After a turn of a streaming session SGLang counts as computed the KV of all tokens "
        "that have a slot. With the slots of a tree this includes the last token, whose KV is only "
        "computed in the next step.",
    ),
)


def _method_reads_hidden_states(algorithm: Any) -> bool:
    from drafttree.sglang.algorithm import TreeAlgorithm

    return isinstance(algorithm, TreeAlgorithm) and algorithm.method.kind.needs_hidden_states


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

    Each tensor-parallel rank has a part of the KV heads of the target's layers, and all of those of
    the drafter's.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
    from sglang.srt.runtime_context import get_parallel

    def wrap(stock: Callable[..., int]) -> Callable[..., int]:
        def _compute_cell_size(self: Any, kvc: Any, num_layers: int) -> int:
            if _method_reads_hidden_states(kvc.spec_algorithm):
                config = kvc.model_config
                heads = config.get_num_kv_heads(get_parallel().attn_tp_size)
                num_layers += -(-config.get_total_num_kv_heads() // heads)
            return int(stock(self, kvc, num_layers))

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


def keep_computed_kv_of_sessions() -> None:
    """Let the next turn of a streaming session compute the KV of the last turn's last token.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.session.streaming_session import StreamingSession
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    if not hasattr(StreamingSession, "borrowed_slot"):
        raise unknown("StreamingSession has no borrowed_slot")

    def wrap(stock: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def try_cache_finished_req(self: Any, req: Any) -> bool:
            algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
            if not isinstance(algorithm, TreeAlgorithm):
                return stock(self, req)
            # The request no longer has the session's record afterwards.
            slot = self.borrowed_slot(req)
            kept = stock(self, req)
            if kept and req.output_ids:
                computed = len(req.origin_input_ids) + len(req.output_ids) - 1
                slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, computed)
            return kept

        return try_cache_finished_req

    expected = ["self", "req"]
    replace_function(
        StreamingSession, "try_cache_finished_req", wrap, expected=expected, unknown=unknown
    )
