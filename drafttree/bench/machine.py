"""The name of the processor a run was made on."""

from __future__ import annotations

import platform
import subprocess


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
