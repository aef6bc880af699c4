"""CUDA graphs over whole trees, and over what is smaller than one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

MOST_REQUESTS = 16
"""Graphs serve so many whole trees together; of small trees more, up to `MOST_TOKENS`."""

MOST_TOKENS = 512

_CHOSEN = "drafttree_graphs"
"""On the engine's configuration: the sizes are ours."""


def capture_sizes(nodes: int) -> list[int]:
    """Tokens of the batches to capture, of trees of `nodes` nodes, the root not counted.

    The engine captures whole steps at multiples of a tree's size alone.
    """
    tree = 1 + nodes
    most = max(MOST_REQUESTS, MOST_TOKENS // tree)
    requests = [*range(1, MOST_REQUESTS + 1), *range(MOST_REQUESTS + 8, most + 1, 8)]
    return [tree * each for each in requests]


def small_sizes(tree: int) -> list[int]:
    """Tokens of the batches below a whole tree of `tree` nodes, the root counted."""
    return [size for size in (1, 2, 4, *range(8, tree, 8)) if size < tree]


def capture_whole_trees(engine: EngineArgs, config: SpeculativeConfig, nodes: int) -> None:
    """Let steps in which every request has a whole tree run as one graph each.

    The engine gives up such graphs under a schedule of drafts by batch size, as their number may
    then change. Ours, which keeps it from filling up requests, changes nothing: it need not know.
    Sizes that were asked for stay.
    """
    # Called without arguments `bool` says no, and it can be sent to the engine's other processes.
    object.__setattr__(config, "uses_dynamic_speculative_decoding", bool)
    compilation = engine.compilation_config
    asked = (
        engine.cudagraph_capture_sizes,
        engine.max_cudagraph_capture_size,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
    )
    budget = engine.max_num_batched_tokens
    sizes = [size for size in capture_sizes(nodes) if budget is None or size <= budget]
    if sizes and all(each is None for each in asked):
        # Read after this; whoever makes a second configuration of these arguments finds it.
        engine.cudagraph_capture_sizes = sizes
        object.__setattr__(config, _CHOSEN, True)


def capture_small_batches(
    config: SpeculativeConfig, compilation: CompilationConfig, dispatcher: CudagraphDispatcher
) -> None:
    """Let plain steps and small trees run as graphs of their own size, piece by piece.

    The engine has rounded all sizes up to whole trees and knows its graphs: without this a single
    token would be computed as a whole tree. Sizes that were asked for stay.
    """
    mode = dispatcher.cudagraph_mode
    if not getattr(config, _CHOSEN, False) or mode.mixed_mode().name != "PIECEWISE":
        return
    tree = 1 + config.num_speculative_tokens
    whole = [size for size in compilation.cudagraph_capture_sizes or () if size >= tree]
    compilation.cudagraph_capture_sizes = [*small_sizes(tree), *whole]
    dispatcher.initialize_cudagraph_keys(mode, tree)
