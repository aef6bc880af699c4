"""The C++ libraries of the CPU kernels: shipped with the wheel, or compiled on first use.

Without a library or a compiler the slower PyTorch references run instead.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tree_kernels import _build
from tree_kernels.cache import cache_root, make_private
from tree_kernels.machine import find_compiler, processor_flags, processor_name

logger = logging.getLogger(__name__)


@functools.cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """Load the library of a C++ file, or compile it first; None, after one warning in the log, if
    neither is possible."""
    if (shipped := _build.shipped_library(source)) is not None:
        try:
            return ctypes.CDLL(str(shipped))
        except OSError as error:
            logger.warning("%s is compiled anew, as it cannot be loaded: %s", shipped, error)
    compiler = find_compiler()
    if compiler is None:
        logger.warning(
            "No C++ compiler: %s runs in PyTorch, more slowly; install g++ or set CXX",
            source.stem,
        )
        return None
    try:
        return _compiled(compiler, source)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error)
        if "__kmpc" in reason:
            reason += "; PyTorch has not loaded the OpenMP library of clang++: use g++"
        logger.warning(
            "%s could not be compiled or loaded and runs in PyTorch, more slowly: %s",
            source.name,
            reason,
        )
        return None


def _compiled(compiler: Sequence[str], source: Path) -> ctypes.CDLL:
    # `-march=native` depends on the processor, and several machines may share a cache.
    processor = (processor_name(), *processor_flags())
    version = _build.run(*compiler, "--version")
    key = _build.digest(source, version, *compiler[1:], *processor)
    folder = cache_root() / "kernels"
    library = folder / f"{source.stem}-{key}.so"
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        pass  # It is not there, not readable or damaged.
    scratch_folder, is_kept = _scratch_folder(folder, source)
    with scratch_folder as scratch:
        made = Path(scratch) / library.name
        _build.compile_library(compiler, source, "native", made)
        loaded = ctypes.CDLL(str(made))
        if is_kept:
            # Atomic, because other processes may build and load the same library at the same time.
            made.replace(library)
        return loaded


def _scratch_folder(folder: Path, source: Path) -> tuple[tempfile.TemporaryDirectory[str], bool]:
    """A folder to compile in: in `folder`, or where temporary files are if that is not writable.

    Returns:
        The folder, and whether it is in `folder`.
    """
    try:
        # Whoever can write here can run code in the engine.
        make_private(folder)
        return tempfile.TemporaryDirectory(prefix=f".{source.stem}-", dir=folder), True
    except OSError as error:
        logger.warning(
            "cannot keep compiled kernels in %s (%s): set DRAFTTREE_CACHE to a writable folder",
            folder,
            error,
        )
        return tempfile.TemporaryDirectory(prefix=f"{source.stem}-"), False
