"""The folder in which drafttree keeps what it makes once and uses again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_root() -> Path:
    """The folder that `DRAFTTREE_CACHE` names, or else drafttree's folder in the user's cache."""
    chosen = os.environ.get("DRAFTTREE_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("drafttree")
