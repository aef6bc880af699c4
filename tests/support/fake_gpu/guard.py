"""Compiles and loads the device guard, as the C++ kernels are compiled."""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch.utils.cpp_extension import include_paths
from tree_kernels import _build
from tree_kernels.cache import cache_root
from tree_kernels.machine import find_compiler

SOURCE = Path(__file__).with_name("guard.cpp")


@functools.cache
def load() -> None:
    """Let PyTorch accept tensors on CUDA devices; once in a process."""
    compiler = find_compiler()
    assert compiler is not None
    folder = cache_root() / "kernels"
    library = folder / f"guard-{_build.digest(SOURCE, torch.__version__)}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=folder) as scratch,
            mock.patch.dict(os.environ, CPLUS_INCLUDE_PATH=os.pathsep.join(include_paths())),
        ):
            made = Path(scratch) / library.name
            _build.compile_library(compiler, SOURCE, "x86-64", made)
            # Atomic, because other processes may build it at the same time.
            made.replace(library)
    # PyTorch has loaded this library, but not for others to find.
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
