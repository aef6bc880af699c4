"""The names under which a run's processor, models and options are reported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tree_kernels import machine

WIDENED_FROM = "drafttree_widened_from"
"""Key in the config.json of a widened model: a small one padded to the cost of a large one."""


_EXTENSIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
"""Names of instruction sets by CPU flag, widest first; the cost of verification depends on them."""


def processor_name() -> str:
    """The processor's model name and the widest extension that speeds up matrix products."""
    name, flags = machine.processor_name(), machine.processor_flags()
    widest = next((words for flag, words in _EXTENSIONS.items() if flag in flags), None)
    return f"{name}, {widest}" if widest else name


def model_name(folder: Path) -> str:
    """The folder's name; for a widened model also the name of the small model inside it."""
    folder = folder.resolve()
    try:
        small = json.loads((folder / "config.json").read_text()).get(WIDENED_FROM)
    except (OSError, ValueError, AttributeError, RecursionError):
        small = None
    return folder.name if small is None else f"{folder.name}: {small['model']}, widened"


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A method's options for a report, in which a drafter's folder is given by its name."""
    if "model" not in options:
        return dict(options)
    return {**options, "model": model_name(Path(options["model"]))}
