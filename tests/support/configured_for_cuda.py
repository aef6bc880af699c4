"""Prints how vLLM would configure itself on a GPU, on a machine without one.

    python configured_for_cuda.py '[{"model": ...}, ...]'

Takes engine arguments as JSON, and prints a line of JSON for each. vLLM chooses its model runner as
on a GPU, which has Triton.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any


def _fake_gpu() -> None:
    """Let vLLM configure itself as on a Hopper GPU."""
    library = "vllm._C_stable_libtorch"
    try:
        importlib.import_module(library)
    except ImportError:
        # The engine's CPU build lacks this library; none of its functions is called.
        sys.modules[library] = types.ModuleType(library)
    import vllm.config.vllm
    import vllm.platforms
    import vllm.triton_utils
    import vllm.v1.cudagraph_dispatcher  # importing it later would need operators of a GPU
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    for module in (vllm.triton_utils, vllm.config.vllm):
        module.HAS_TRITON = True  # type: ignore[attr-defined]

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "H100"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

    vllm.platforms._current_platform = Hopper()


def _configured(arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    engine = EngineArgs(**arguments)
    for _ in range(2):  # the second configuration of the same arguments must be like the first
        config = engine.create_engine_config()
    backend = config.attention_config.backend
    sizes = list(config.compilation_config.cudagraph_capture_sizes)
    return {
        "mode": config.compilation_config.cudagraph_mode.name,
        "sizes": sizes,
        "graphs": _graphs(config),
        "backend": backend and backend.name,
        "worker": config.parallel_config.worker_cls,
        "asynchronous": config.scheduler_config.async_scheduling,
    }


def _graphs(config: Any) -> dict[int, list[Any]] | None:
    """Kind and size of the graph that serves a step, by token count, with a tree worker for V1."""
    if config.speculative_config is None or config.use_v2_model_runner:
        return None
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    from drafttree.vllm.graphs import capture_small_batches

    tree = 1 + config.speculative_config.num_speculative_tokens
    compilation = config.compilation_config
    mode = compilation.resolve_cudagraph_mode_and_sizes(AttentionCGSupport.ALWAYS, None, tree)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(mode, tree)
    for _ in range(2):  # the engine does this twice, first to measure the memory of graphs
        capture_small_batches(config.speculative_config, compilation, dispatcher)
    graphs = {}
    for tokens in (1, 3, 8, 64, tree, tree + 1, 2 * tree, 4096):
        kind, batch = dispatcher.dispatch(tokens, uniform_decode=tokens % tree == 0)
        graphs[tokens] = [kind.name, batch.num_tokens]
    return graphs


if __name__ == "__main__":
    _fake_gpu()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for each in json.loads(sys.argv[1]):
        print(json.dumps(_configured(each)))
