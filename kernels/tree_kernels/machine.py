"""The processor and the C++ compiler of this machine."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def find_compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: the one in `CXX`, with its arguments, else g++; None if
    there is none."""
    chosen = os.environ.get("CXX", "")
    try:
        program, *arguments = shlex.split(chosen) or ["g++"]
    except ValueError:  # a quote that is not closed
        program, *arguments = [chosen]
    path = shutil.which(program)
    return None if path is None else (path, *arguments)


def processor_name() -> str:
    """The processor's model name, or its architecture if the model is unknown."""
    name = _of_cpuinfo("model name") or _of_lscpu("Model name")
    return name or platform.processor() or platform.machine()


def processor_flags() -> list[str]:
    """The instruction-set extensions, such as "avx2", as Linux names them; empty if unknown."""
    return (_of_cpuinfo("flags") or _of_cpuinfo("Features")).split()


def _of_cpuinfo(key: str) -> str:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return _value(lines, key)


def _of_lscpu(key: str) -> str:
    # On ARM, /proc/cpuinfo has numbers, which lscpu translates.
    try:
        done = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return _value(done.stdout.splitlines(), key)


def _value(lines: list[str], key: str) -> str:
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")
