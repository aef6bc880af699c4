"""Patches of the sizes of vLLM's CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttree.patches import Patch, check_parameters
from drafttree.vllm.patches.settings import set_attributes
from drafttree.vllm.versions import unknown

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

UNLESS_SET = "On CUDA, unless the user has set sizes."
BEFORE_CAPTURE = "On CUDA, before graphs are captured, unless the user has set sizes."

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.cudagraph_capture_sizes",
        when=UNLESS_SET,
        reason="vLLM's setting for the sizes of CUDA graphs. By default the largest has 512 tokens "
        "on most GPUs, which is only a few whole trees.",
    ),
    *(
        Patch(
            target=f"{owner}.drafttree_graphs",
            when=UNLESS_SET,
            reason="An additional attribute: the sizes that drafttree has chosen, as opposed to "
            "sizes that the user has set.",
        )
        for owner in ("vllm.engine.arg_utils:EngineArgs", "vllm.config:SpeculativeConfig")
    ),
    Patch(
        target="vllm.config:CompilationConfig.cudagraph_capture_sizes",
        when=BEFORE_CAPTURE,
        reason="vLLM rounds all sizes up to whole trees, so a step with a single token would be "
        "padded to a whole tree. Sizes smaller than a tree are added.",
    ),
    *(
        Patch(
            target=f"vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.{name}",
            when=BEFORE_CAPTURE,
            reason="The dispatcher has read the sizes before the smaller ones were added, so it is "
            "initialised again.",
        )
        for name in ("cudagraph_keys", "_bs_to_padded_graph_size")
    ),
)

_GRAPHS = "drafttree_graphs"  # attribute of settings whose capture sizes drafttree has chosen


def choose_capture_sizes(engine: EngineArgs, config: SpeculativeConfig, sizes: list[int]) -> None:
    """Let an engine whose user has set no sizes capture steps of these numbers of tokens."""
    # The engine reads this later, also for further configurations of these arguments.
    set_attributes(engine, cudagraph_capture_sizes=sizes)
    for settings in (engine, config):
        object.__setattr__(settings, _GRAPHS, sizes)


def chosen_capture_sizes(settings: EngineArgs | SpeculativeConfig) -> list[int] | None:
    """The sizes of CUDA graphs that drafttree has chosen for an engine, if it has."""
    return getattr(settings, _GRAPHS, None)


def replace_capture_sizes(
    config: CompilationConfig, dispatcher: CudagraphDispatcher, sizes: list[int], tree_size: int
) -> None:
    """Capture other steps than the engine has planned.

    Args:
        config: The engine's compilation settings.
        dispatcher: The model runner's dispatcher of graphs.
        sizes: Numbers of tokens of the steps to capture.
        tree_size: Number of nodes of a whole tree.
    """
    parameters = ["cudagraph_mode", "uniform_decode_query_len"]
    name = "CudagraphDispatcher.initialize_cudagraph_keys"
    check_parameters(name, dispatcher.initialize_cudagraph_keys, parameters, unknown)
    set_attributes(config, cudagraph_capture_sizes=sizes)
    dispatcher.initialize_cudagraph_keys(dispatcher.cudagraph_mode, tree_size)
