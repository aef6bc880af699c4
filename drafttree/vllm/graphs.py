"""CUDA graphs over whole trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

MOST_REQUESTS = 16
"""Graphs serve so many whole trees together; of small trees more, up to `MOST_TOKENS`."""

MOST_TOKENS = 512


def capture_sizes(nodes: int) -> list[int]:
    """Tokens of the batches to capture, of trees of `nodes` nodes, the root not counted.

    The engine captures whole steps at multiples of a tree's size alone.
    """
    tree = 1 + nodes
    most = max(MOST_REQUESTS, MOST_TOKENS // tree)
    requests = [*range(1, MOST_REQUESTS + 1), *range(MOST_REQUESTS + 8, most + 1, 8)]
    return [tree * each for each in requests]


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
