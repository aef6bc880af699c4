"""How a run names the processor that it was made on."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import pytest

from drafttree.bench.machine import processor_name

LSCPU = """Architecture:            x86_64
Vendor ID:               {vendor}
  Model name:            {vendor} X
    Flags:               fpu sse2 {flags}
"""


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
def test_it_says_which_products_the_processor_does(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: str
) -> None:
    def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, LSCPU.format(vendor="Acme", flags=flags))

    monkeypatch.setattr(subprocess, "run", run)
    assert processor_name() == expected


def test_without_lscpu_the_platform_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError("lscpu")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(platform, "processor", lambda: "x86")
    assert processor_name() == "x86"
