"""What a run was made with: the names of the processor and of the model."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

WIDENED_FROM = "drafttree_widened_from"
"""In the config.json of a model as dear as a larger one, which says what a small one says."""


_EXTENSIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
"""By the flag that tells, from the widest: what a further row of a forward costs hangs on them."""


def processor_name() -> str:
    """The model name `lscpu` gives and the widest products that it does, or what is known."""
    try:
        output = subprocess.run(
            ["lscpu"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    pairs = (line.partition(":") for line in output.splitlines())
    told = {key.strip(): value.strip() for key, _, value in pairs}
    name = told.get("Model name") or platform.processor() or platform.machine()
    flags = told.get("Flags", "").split()
    widest = next((words for flag, words in _EXTENSIONS.items() if flag in flags), None)
    return f"{name}, {widest}" if widest else name


def model_name(folder: Path) -> str:
    """The folder's name, and for a widened model which one it says the words of."""
    folder = folder.resolve()
    try:
        small = json.loads((folder / "config.json").read_text()).get(WIDENED_FROM)
    except (OSError, ValueError):
        small = None
    return folder.name if small is None else f"{folder.name}: {small['model']}, widened"
