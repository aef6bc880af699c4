"""`scripts/hosts/overlay.py`: another version's Python files, with the installed libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from scripts.hosts.overlay import make_overlay

FILES = {
    "vllm/__init__.py": "from vllm._version import version",
    "vllm/_version.py": "__version__ = version = '0.99.1'\n",
    "vllm/data/one.json": "{}",
    "vllm/_C.abi3.so": "for a GPU",
    "vllm/csrc/one.cu": "",
    "vllm-0.99.1.dist-info/METADATA": "",
}


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """An installed package."""
    build = tmp_path / "installed" / "vllm"
    (build / "sub").mkdir(parents=True)
    (build / "_C.abi3.so").write_text("for a CPU")
    (build / "sub" / "_D.abi3.so").write_text("for a CPU")
    (build / "old.py").write_text("")
    return build


@pytest.mark.parametrize("packed", [True, False])
def test_an_overlay(tmp_path: Path, build: Path, packed: bool) -> None:
    for name, content in FILES.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    source = tmp_path / "source" / "vllm"
    if packed:
        source = tmp_path / "vllm.whl"
        with ZipFile(source, "w") as wheel:
            for name in FILES:
                wheel.write(tmp_path / "source" / name, name)
    overlay = tmp_path / "overlay"
    for _ in range(2):
        assert make_overlay(source, overlay, build) == "0.99.1"
    assert (overlay / "vllm" / "_C.abi3.so").read_text() == "for a CPU"
    assert (overlay / "vllm" / "sub" / "_D.abi3.so").exists()
    assert (overlay / "vllm" / "data" / "one.json").exists()
    assert not (overlay / "vllm" / "old.py").exists()
    program = "import vllm; from importlib.metadata import version; print(version('vllm'))"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(overlay)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "0.99.1+cpu\n"


def test_what_is_no_source_or_no_build(tmp_path: Path, build: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, libraries, message in (
        (tmp_path / "empty", build, "does not name a version"),
        (build, tmp_path / "empty", "no compiled libraries"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            make_overlay(source, tmp_path / "overlay", libraries)
