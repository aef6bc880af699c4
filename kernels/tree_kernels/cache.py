"""The folder of drafttree's cache, and how folders are made that only their owner may enter."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_root() -> Path:
    """The folder in `DRAFTTREE_CACHE`, or else drafttree's folder in the user's cache folder."""
    chosen = os.environ.get("DRAFTTREE_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("drafttree")


def make_private(folder: Path) -> None:
    """Make a folder that does not exist yet, and the missing ones above it, for their owner alone.

    Raises:
        OSError: It cannot be made.
    """
    # With `parents=True` the folders above it would have the process's default permissions.
    if not folder.parent.is_dir():
        make_private(folder.parent)
    folder.mkdir(0o700, exist_ok=True)
