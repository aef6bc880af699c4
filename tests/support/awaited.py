"""Waits for what an engine does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 200.0
"""Timeout; the machine may be busy."""


def wait_for(file: Path | None) -> None:
    """Wait until a file exists, unless it is None."""
    if file is not None:
        wait_until(file.exists, f"{file} was not written")


def wait_until(is_so: Callable[[], bool], failure: str) -> None:
    """Wait until something is so; `failure` says that it never was."""
    give_up = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < give_up, failure
        time.sleep(0.05)
