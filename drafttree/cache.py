"""Where drafttree keeps what it makes once and uses again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_root() -> Path:
    """`DRAFTTREE_CACHE`, or the user's cache folder."""
    chosen = os.environ.get("DRAFTTREE_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("drafttree")
