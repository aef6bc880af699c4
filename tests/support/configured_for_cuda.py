"""Prints how vLLM would configure itself on a GPU, on a machine without one.

    python configured_for_cuda.py '[{"model": ...}, ...]'

Takes engine arguments as JSON, and prints a line of JSON for each.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any


def _pretend() -> None:
    library = "vllm._C_stable_libtorch"
    try:
        importlib.import_module(library)
    except ImportError:
        # The engine's CPU build lacks it; nothing of it is called.
        sys.modules[library] = types.ModuleType(library)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

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

    config = EngineArgs(**arguments).create_engine_config()
    backend = config.attention_config.backend
    return {
        "mode": config.compilation_config.cudagraph_mode.name,
        "sizes": config.compilation_config.cudagraph_capture_sizes,
        "backend": backend and backend.name,
        "worker": config.parallel_config.worker_cls,
    }


if __name__ == "__main__":
    _pretend()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for each in json.loads(sys.argv[1]):
        print(json.dumps(_configured(each)))
