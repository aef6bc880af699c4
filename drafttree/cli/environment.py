"""What there is in this environment: packages, devices and the processor.

Packages that may be broken are imported in separate processes, so that failures can be reported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

import psutil
from pydantic import BaseModel

# Package indexes serve CUDA builds of these. With a CPU build of torch they cannot be imported, and
# vLLM fails with them, although it does not need them.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


class Trial(BaseModel):
    """Result of importing a package in a new process; no field is set if it is not installed.

    Attributes:
        version: Version of the package, if the import succeeded.
        error: Last line of the error, if it failed.
        printed: The last line that was printed before, if the import succeeded.
    """

    version: str | None = None
    error: str | None = None
    printed: str = ""


def broken_companions() -> dict[str, str]:
    """The error of each of torch's companions that is installed but cannot be imported."""
    trials = {package: try_import(package).error for package in CUDA_COMPANIONS}
    return {package: error for package, error in trials.items() if error is not None}


def try_import(
    package: str, further: str = "", environment: Mapping[str, str] | None = None
) -> Trial:
    """Import a package in a new process and return its version or the error.

    Args:
        package: Name of the package.
        further: Statements to run after the import.
        environment: Environment variables to add to those of this process.
    """
    if find_spec(package) is None:
        return Trial()
    program = f"import {package}\n{further}\nprint()\nprint({package}.__version__)"
    command = [sys.executable, "-P", "-c", program]
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=180,
            env=os.environ | path | dict(environment or {}),
        )
    except subprocess.TimeoutExpired:
        return Trial(error=f"importing {package} takes more than three minutes")
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return Trial(error=lines[-1])
    *_, printed, _, version = ["", "", *result.stdout.splitlines()]
    return Trial(version=version, printed=printed)


def has_cuda() -> bool:
    """Whether torch finds a CUDA device."""
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:
        return False


def devices() -> str:
    """torch's devices, in words."""
    if not has_cuda():
        return "CPU only"
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return f"CUDA {torch.version.cuda}: {names}"


def cores() -> int:
    """Number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> str:
    """Size of the memory, in words."""
    return f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
