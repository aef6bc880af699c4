"""The folder of drafttree's cache."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_root() -> Path:
    """The folder in `DRAFTTREE_CACHE`, or else drafttree's folder in the user's cache folder."""
    chosen = os.environ.get("DRAFTTREE_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("drafttree")
