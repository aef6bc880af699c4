"""Waits for what an engine writes while it has no request."""

from __future__ import annotations

import time
from pathlib import Path

SECONDS = 200.0
"""Timeout; the machine may be busy."""


def wait_for(file: Path | None) -> None:
    """Wait until a file exists, unless it is None."""
    give_up = time.monotonic() + SECONDS
    while file is not None and not file.exists():
        assert time.monotonic() < give_up, f"{file} was not written"
        time.sleep(0.05)
