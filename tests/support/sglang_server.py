"""SGLang's server with Token Recycling, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from sglang_runs import environment

from scripts.server_process import free_port, wait_until_up


@contextmanager
def serving(model: Path, options: dict[str, Any], folder: Path, *arguments: str) -> Iterator[str]:
    """Serve a model, and check at the end that the server stops without an error.

    Args:
        model: The target's folder.
        options: Token Recycling's options.
        folder: Where the server's log is written.
        arguments: Further arguments of the server.

    Returns:
        The server's address.
    """
    port = free_port()
    log = folder / "log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--speculative-algorithm", "token-recycling"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-total-tokens", "8192", "--context-length", "1024"),
        *("--max-running-requests", "4", "--skip-server-warmup"),
        *arguments,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment() | {"DRAFTTREE_OPTIONS": json.dumps(options)},
            stdout=output,
            stderr=output,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(address, process, log)
        yield address
        process.send_signal(signal.SIGTERM)
        # After a signal SGLang's exit status may be that of the signal.
        assert process.wait(60) in (0, -signal.SIGTERM, -signal.SIGKILL), log.read_text()[-3000:]
        assert "Application shutdown complete" in log.read_text()
        assert "Scheduler hit an exception" not in log.read_text()
    finally:
        if process.poll() is None:
            process.kill()


def counters_of(address: str) -> dict[str, int]:
    """The tree worker's counts since the server's start."""
    info = httpx.get(f"{address}/get_server_info", timeout=10).json()
    return dict(info["internal_states"][0]["drafttree"])
