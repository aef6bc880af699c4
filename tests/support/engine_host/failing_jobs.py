"""Jobs whose process does not end as it should, although they return a result."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path


def ends_with_an_error() -> str:
    """The process ends with status 3."""
    atexit.register(os._exit, 3)
    return "a result"


def never_ends(file: Path) -> str:
    """The process has to be killed; it creates the file once its result is written."""
    atexit.register(time.sleep, 600)
    atexit.register(file.touch)
    return "a result"
