"""Sizes of the steps that vLLM captures as CUDA graphs: whole trees, and smaller steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttree.vllm import patches

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

MAX_REQUESTS = 16
"""Greatest number of whole trees in a graph, or more while they have at most `MAX_TOKENS` nodes."""

MAX_TOKENS = 512


def capture_sizes(num_draft_tokens: int) -> list[int]:
    """Token counts of the steps to capture in which every request has a whole tree.

    The engine captures full graphs at multiples of a tree's size only.

    Args:
        num_draft_tokens: Draft tokens of a tree.
    """
    tree_size = 1 + num_draft_tokens
    most = max(MAX_REQUESTS, MAX_TOKENS // tree_size)
    requests = [*range(1, MAX_REQUESTS + 1), *range(MAX_REQUESTS + 8, most + 1, 8)]
    return [tree_size * each for each in requests]


def small_sizes(tree_size: int) -> list[int]:
    """Token counts of the steps to capture that are smaller than a tree."""
    return [size for size in (1, 2, 4, *range(8, tree_size, 8)) if size < tree_size]


def capture_whole_trees(
    engine: EngineArgs, config: SpeculativeConfig, num_draft_tokens: int
) -> None:
    """Let steps in which every request has a whole tree run as one graph each.

    Sizes that the user has set are kept.
    """
    compilation = engine.compilation_config
    asked = (
        engine.cudagraph_capture_sizes,
        engine.max_cudagraph_capture_size,
        compilation.cudagraph_capture_sizes,
        compilation.max_cudagraph_capture_size,
    )
    budget = engine.max_num_batched_tokens
    sizes = [size for size in capture_sizes(num_draft_tokens) if budget is None or size <= budget]
    # The same arguments may have been configured before.
    unset = (None, patches.chosen_capture_sizes(engine))
    if sizes and all(each in unset for each in asked):
        patches.choose_capture_sizes(engine, config, sizes)


def capture_small_batches(
    config: SpeculativeConfig, compilation: CompilationConfig, dispatcher: CudagraphDispatcher
) -> None:
    """Let plain steps and small trees run as piecewise graphs of their own size.

    By now the engine has rounded all sizes up to whole trees. With those alone, a step with a
    single token would be padded to a whole tree. Sizes that the user has set are kept.
    """
    piecewise = dispatcher.cudagraph_mode.mixed_mode().name == "PIECEWISE"
    if patches.chosen_capture_sizes(config) is None or not piecewise:
        return
    tree_size = 1 + config.num_speculative_tokens
    whole = [size for size in compilation.cudagraph_capture_sizes or () if size >= tree_size]
    sizes = [*small_sizes(tree_size), *whole]
    patches.replace_capture_sizes(compilation, dispatcher, sizes, tree_size)
