"""The processor's name in reports, and the compiler."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tree_kernels import machine

from drafttree.bench.machine import processor_name

CPUINFO = """processor\t: 0
vendor_id\t: Acme
model name\t: Acme X
flags\t\t: fpu sse2 {flags}

processor\t: 1
model name\t: Acme X
flags\t\t: fpu sse2 {flags}
"""
ARM_CPUINFO = """processor\t: 0
Features\t: fp asimd
CPU part\t: 0xd4f
"""
LSCPU = """Architecture:            aarch64
Vendor ID:               Acme
  Model name:            Acme Y
"""


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", file)
    return file


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2", "Acme X, AVX2"),
        ("avx2 avx512f", "Acme X, AVX-512"),
        ("avx2 avx512f avx512_bf16", "Acme X, AVX-512 with bfloat16"),
        ("avx512_bf16 avx512f avx2 amx_bf16 amx_tile", "Acme X, AMX"),
        ("", "Acme X"),
    ],
)
def test_the_name_ends_in_the_widest_extension(cpuinfo: Path, flags: str, expected: str) -> None:
    cpuinfo.write_text(CPUINFO.format(flags=flags))
    assert processor_name() == expected


def test_lscpu_names_processors_that_the_kernel_numbers(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, LSCPU)

    cpuinfo.write_text(ARM_CPUINFO)
    monkeypatch.setattr(subprocess, "run", run)
    assert processor_name() == "Acme Y"
    assert machine.processor_flags() == ["fp", "asimd"]


def test_without_either_the_platform_names_it(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError("lscpu")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(platform, "processor", lambda: "x86")
    assert processor_name() == "x86"
    assert machine.processor_flags() == []


def test_the_compiler_is_the_one_that_cxx_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("g++", "ccache"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.find_compiler() == (str(tmp_path / "g++"),)
    monkeypatch.setenv("CXX", "ccache 'g++' -O2")
    assert machine.find_compiler() == (str(tmp_path / "ccache"), "g++", "-O2")
    for wrong in ("missing g++", "g++ 'open"):
        monkeypatch.setenv("CXX", wrong)
        assert machine.find_compiler() is None
