"""vLLM's OpenAI server with its V2 model runner on a CPU, see `v2_on_cpu`.

    python v2_server.py ARGUMENTS

The engine's process, which the server spawns, imports this module too.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import hooks

hooks.install()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
