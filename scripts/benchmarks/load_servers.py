"""The engines' servers for measurements, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from drafttree.bench.engine_process import sglang_environment
from drafttree.bench.methods import BenchMethod
from scripts.server_process import free_port, wait_until_up

SERVED = "model"
"""The name under which the servers serve the target."""

_START_SECONDS = 600
_STOP_SECONDS = 60
_MOST_TOKENS = 2048
"""Most tokens of a request, prompt included."""

_TREE_TOKENS = 512
"""KV slots of a request in SGLang for its draft trees."""


@dataclass(frozen=True)
class ServedTarget:
    """What all servers of a run have in common.

    Attributes:
        engine: `vllm` or `sglang`.
        model: The target's folder.
        dtype: The engine's data type.
        users: Greatest number of requests under way.
        arguments: Further arguments of the servers.
    """

    engine: str
    model: Path
    dtype: str
    users: int
    arguments: Sequence[str] = ()

    @property
    def most_running(self) -> int:
        """Greatest number of requests that a server decodes at a time."""
        return max(8, self.users)

    def version(self, address: str) -> str:
        """The version of the engine that answers at an address."""
        path = "version" if self.engine == "vllm" else "server_info"
        version: str = httpx.get(f"{address}/{path}", timeout=60).json()["version"]
        return version

    @contextmanager
    def serve(self, method: BenchMethod, log: Path) -> Iterator[str]:
        """A server that answers at the address that is yielded.

        Args:
            method: What it speculates with.
            log: The file of its messages.

        Raises:
            RuntimeError: It does not start.
        """
        command, environment = (_vllm if self.engine == "vllm" else _sglang)(self, method)
        port = free_port()
        command += ["--host", "127.0.0.1", "--port", str(port), *self.arguments]
        address = f"http://127.0.0.1:{port}"
        with log.open("w") as output:
            # A session of its own: the engine is another process than the server.
            process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                wait_until_up(address, process, log, _START_SECONDS)
                yield address
            finally:
                _end(process)


def _vllm(target: ServedTarget, method: BenchMethod) -> tuple[list[str], dict[str, str]]:
    """The arguments of vLLM's server, and its environment variables."""
    command = [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(target.model)),
        *("--served-model-name", SERVED, "--dtype", target.dtype),
        *("--max-model-len", str(_MOST_TOKENS), "--max-num-seqs", str(target.most_running)),
        "--disable-uvicorn-access-log",
    ]
    if method.speculative_config is not None:
        command += ["--speculative-config", json.dumps(method.speculative_config)]
    return command, {}


def _sglang(target: ServedTarget, method: BenchMethod) -> tuple[list[str], dict[str, str]]:
    """The arguments of SGLang's server, and its environment variables."""
    command = [
        *("-m", "sglang.launch_server", "--model-path", str(target.model)),
        *("--served-model-name", SERVED, "--dtype", target.dtype),
        *("--context-length", str(_MOST_TOKENS)),
        *("--max-running-requests", str(target.most_running)),
        *("--max-total-tokens", str(target.most_running * (_MOST_TOKENS + _TREE_TOKENS))),
        # An idle scheduler would take a core from the server that is measured.
        *("--sleep-on-idle", "--log-level-http", "warning"),
    ]
    environment = sglang_environment()
    if method.speculative_config is not None:
        options = dict(method.options)
        command += ["--speculative-algorithm", method.name]
        if (model := options.pop("model", None)) is not None:
            command += ["--speculative-draft-model-path", str(model)]
        environment["DRAFTTREE_OPTIONS"] = json.dumps(options)
    return command, environment


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and its engine."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Nothing is left of a server that has ended by itself.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
