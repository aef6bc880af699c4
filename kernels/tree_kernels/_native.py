"""Kernels in C++ for the CPU, compiled where they run: once a machine, then taken from the cache.

Where there is no compiler the references do the same work more slowly."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttree.cache import cache_root

logger = logging.getLogger(__name__)

_COMPILE = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-Wall"),
    # The reductions of a matrix product need no more; -ffast-math would change the whole process.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    "-fopenmp",
)
# Without -fopenmp: the threads are those of the OpenMP library that PyTorch has loaded already. A
# second library would bring threads of its own, which wait busily against PyTorch's.
_LINK = ("-shared",)
_LONGEST = 300.0


_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64}


@dataclass(frozen=True)
class NativeFunction:
    """A function of a C++ file of this package, compiled when it is first asked for.

    Attributes:
        source: the file's name.
        name: the function's.
        signature: of its arguments, `p` for a pointer and `i` for a 64-bit integer.
    """

    source: str
    name: str
    signature: str

    def on(self, tensor: Tensor) -> Callable[..., None] | None:
        """The function, if `tensor` lies on the CPU and there is a compiler."""
        return None if tensor.is_cuda else _function(self)


@functools.cache
def _function(wanted: NativeFunction) -> Callable[..., None] | None:
    library = load_native(Path(__file__).with_name(wanted.source))
    if library is None:
        return None
    function: Any = library[wanted.name]
    function.restype = None
    function.argtypes = [_TYPES[letter] for letter in wanted.signature]
    return function  # type: ignore[no-any-return]


def compiler() -> str | None:
    """The C++ compiler's path: `CXX`, else g++ or clang++; None if there is none."""
    names = [chosen] if (chosen := os.environ.get("CXX")) else ["g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


@functools.cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """The compiled library of a C++ file; None, said once in the log, if it cannot be made."""
    program = compiler()
    if program is None:
        logger.warning("No C++ compiler (g++): %s runs in PyTorch, more slowly", source.stem)
        return None
    try:
        return ctypes.CDLL(str(_library(program, source)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        logger.warning("%s runs in PyTorch, more slowly: %s", source.stem, said)
        return None


def _library(program: str, source: Path) -> Path:
    version = _run(program, "--version")
    sources = [source, *sorted(source.parent.glob("*.h"))]
    texts = [file.read_text() for file in sources]
    key = "\n".join((*texts, *_COMPILE, *_LINK, version, _processor()))
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    folder = cache_root() / "kernels"
    library = folder / name
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{source.stem}-", dir=folder))
    except OSError as error:
        logger.warning("cannot keep compiled kernels in %s: %s", folder, error)
        workshop = Path(tempfile.mkdtemp(prefix=f"{source.stem}-"))
        library = workshop / name
    made = workshop / "made.so"
    compiled = workshop / "made.o"
    _run(program, *_COMPILE, "-c", str(source), "-o", str(compiled))
    _run(program, *_LINK, str(compiled), "-o", str(made))
    # Whoever else is building the same file makes the same library, and never sees half of it.
    made.replace(library)
    if library.parent != workshop:
        shutil.rmtree(workshop, ignore_errors=True)
    return library


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LONGEST)
    return done.stdout


def _processor() -> str:
    """What `-march=native` depends on, for a cache that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
