"""A server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import httpx


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def is_up(address: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def wait_until_up(
    address: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 240
) -> None:
    """Wait for a server to answer, so many seconds at most.

    Raises:
        RuntimeError: It ends before, or does not answer in time; with the end of its messages.
    """
    deadline = time.monotonic() + seconds
    while not is_up(address):
        problem = None
        if process.poll() is not None:
            problem = f"ended with {process.returncode}"
        elif time.monotonic() >= deadline:
            problem = f"did not start in {seconds:g} s"
        if problem is not None:
            raise RuntimeError(
                f"the server {problem}; its messages: {log}\n{log.read_text()[-3000:]}"
            )
        time.sleep(1)
