"""The C++ libraries of the CPU kernels: shipped with the wheel, or compiled on first use.

Without a library or a compiler the slower PyTorch references run instead.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path

from tree_kernels import _build
from tree_kernels.cache import cache_root, make_private
from tree_kernels.machine import find_compiler, processor_flags, processor_name

logger = logging.getLogger(__name__)


@functools.cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """Load the library of a C++ file, or compile it first; None, after one warning in the log, if
    neither is possible."""
    try:
        if (shipped := _build.shipped_library(source)) is not None:
            return ctypes.CDLL(str(shipped))
        program = find_compiler()
        if program is None:
            logger.warning(
                "No C++ compiler: %s runs in PyTorch, more slowly; install g++ or set CXX",
                source.stem,
            )
            return None
        return ctypes.CDLL(str(_library(program, source)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "%s could not be compiled or loaded and runs in PyTorch, more slowly: %s",
            source.name,
            reason,
        )
        return None


def _library(program: str, source: Path) -> Path:
    # `-march=native` depends on the processor, and several machines may share a cache.
    processor = (processor_name(), *processor_flags())
    key = _build.digest(source, _build.run(program, "--version"), *processor)
    folder = cache_root() / "kernels"
    library = folder / f"{source.stem}-{key}.so"
    if library.is_file():
        return library
    try:
        # Whoever can write here can run code in the engine.
        make_private(folder)
        scratch = Path(tempfile.mkdtemp(prefix=f".{source.stem}-", dir=folder))
    except OSError as error:
        logger.warning(
            "cannot keep compiled kernels in %s (%s): set DRAFTTREE_CACHE to a writable folder",
            folder,
            error,
        )
        scratch = Path(tempfile.mkdtemp(prefix=f"{source.stem}-"))
        library = scratch / library.name
    made = scratch / "made.so"
    _build.compile_library(program, source, "native", made)
    # Atomic, because other processes may build and load the same library at the same time.
    made.replace(library)
    if library.parent != scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return library
