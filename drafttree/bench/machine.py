"""What a run was made with: the names of the processor and of the model."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

WIDENED_FROM = "drafttree_widened_from"
"""In the config.json of a model as dear as a larger one, which says what a small one says."""


def processor_name() -> str:
    """The model name `lscpu` gives, or what the platform knows."""
    try:
        output = subprocess.run(
            ["lscpu"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    for line in output.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def model_name(folder: Path) -> str:
    """The folder's name, and for a widened model which one it says the words of."""
    folder = folder.resolve()
    try:
        small = json.loads((folder / "config.json").read_text()).get(WIDENED_FROM)
    except (OSError, ValueError):
        small = None
    return folder.name if small is None else f"{folder.name}: {small['model']}, widened"
