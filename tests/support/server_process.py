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


def wait_until_up(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a server to answer, four minutes at most; its log is shown if it does not."""
    deadline = time.monotonic() + 240
    while not is_up(address):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(1)
