"""Compilation of the C++ kernels: flags, and the libraries that a wheel ships.

A wheel has one library for each kernel and each of `INSTRUCTION_SETS`; `shipped_library` finds the
best one that this processor can run. `setup.py` imports this module when it builds a wheel, so it
needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tree_kernels.machine import find_compiler, processor_flags

SHIPPED = "_shipped"
COMPILE_TIMEOUT = 300.0

_COMPILE = (
    *("-std=c++17", "-O3", "-fPIC", "-Wall"),
    # Enough to vectorise matrix products; -ffast-math would change the whole process.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    "-fopenmp",
)
# Linked without -fopenmp, to use the OpenMP library that PyTorch has already loaded. The threads of
# a second one would compete with PyTorch's for cores.
_LINK = ("-shared",)


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set for which a wheel has libraries.

    Attributes:
        march: The instruction set's name, as the compiler's `-march` takes it.
        flags: The processor flags that it needs, as `/proc/cpuinfo` writes them.
    """

    march: str
    flags: frozenset[str]


_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
# Best first. PyTorch's own CPU kernels are slow without AVX2, so wheels support no older
# processors: these compile on first use, as do other architectures.
INSTRUCTION_SETS = (InstructionSet("x86-64-v4", _V4), InstructionSet("x86-64-v3", _V3))


def run(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        subprocess.SubprocessError: The command failed or took more than `COMPILE_TIMEOUT` seconds.
    """
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT
    )
    return done.stdout


def compile_library(compiler: Sequence[str], source: Path, march: str, library: Path) -> None:
    """Compile one C++ file to a shared library.

    The library appears at its path complete or not at all.

    Args:
        compiler: The command of the compiler.
        source: The C++ file.
        march: The instruction set, as the compiler's `-march` takes it.
        library: The path to write. Its folder must exist.

    Raises:
        OSError: The compiler cannot be started.
        subprocess.SubprocessError: The compiler failed.
    """
    compiled, linked = (library.with_name(f".{library.stem}{end}") for end in (".o", ".linked"))
    run(*compiler, *_COMPILE, f"-march={march}", "-c", str(source), "-o", str(compiled))
    run(*compiler, *_LINK, str(compiled), "-o", str(linked))
    compiled.unlink()
    linked.replace(library)


def digest(source: Path, *further: str) -> str:
    """A hash of a C++ file, the headers beside it, the compiler's flags and `further`."""
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    key = "\n".join((*texts, *_COMPILE, *_LINK, *further))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def shipped_name(source: Path, instructions: InstructionSet) -> str:
    """The file name of a kernel's library in the wheel.

    It contains a hash of the sources, so a library of older sources is never loaded.
    """
    return f"{source.stem}-{instructions.march}-{digest(source, instructions.march)}.so"


def shipped_library(source: Path) -> Path | None:
    """The wheel's library for this kernel and processor; None if there is none."""
    present = set(processor_flags())
    for instructions in INSTRUCTION_SETS:
        library = source.parent / SHIPPED / shipped_name(source, instructions)
        if instructions.flags <= present and library.is_file():
            return library
    return None


def can_build_wheel_libraries() -> bool:
    """Whether this machine can compile libraries for a wheel: Linux, x86-64 and a compiler."""
    on_x86_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    return on_x86_linux and find_compiler() is not None


def build_wheel_libraries(sources: Path, folder: Path) -> list[str]:
    """Compile every kernel for every instruction set.

    A file that does not compile is left out: the kernel is then compiled on first use, or runs in
    PyTorch.

    Args:
        sources: The folder of the C++ files.
        folder: The folder to write the libraries to. Its contents are removed first.

    Returns:
        One line for each library that could not be compiled.
    """
    compiler = find_compiler()
    assert compiler is not None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    failures = []
    for source in sorted(sources.glob("*.cpp")):
        for instructions in INSTRUCTION_SETS:
            library = folder / shipped_name(source, instructions)
            try:
                compile_library(compiler, source, instructions.march, library)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or error
                failures.append(f"{source.name} for {instructions.march}: {said}")
    return failures
