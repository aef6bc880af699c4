"""The pack for a GPU machine: code for one architecture, files by pattern, split into pieces."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pack
from fatbin import containers, keep_architecture

PTX, CUBIN = 1, 2
MAGIC = (0xBA55ED50).to_bytes(4, "little")


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0")
    return (header + architecture.to_bytes(4, "little")).ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<4sHHQ", MAGIC, 1, 16, len(body)) + body


def test_only_what_the_architecture_runs_is_kept() -> None:
    built = container(entry(CUBIN, 80, b"A" * 8), entry(CUBIN, 90, b"B" * 16))
    from_source = container(
        entry(PTX, 70, b"C" * 8), entry(PTX, 80, b"D" * 8), entry(PTX, 100, b"E" * 8)
    )
    library = b"\x7fELF" + MAGIC + b"no container" + built + b"text" + from_source + b"end"
    slimmed = keep_architecture(library, 90)
    assert len(slimmed) == len(library)
    assert [len(entries) for entries in containers(slimmed)] == [2, 3]
    for kept in (b"B" * 16, b"D" * 8, b"\x7fELF", b"no container", b"text", b"end"):
        assert kept in slimmed
    for blanked in (b"A", b"C", b"E"):
        assert blanked * 8 not in slimmed


def test_matching_files_of_a_wheel_are_unpacked(tmp_path: Path) -> None:
    wheel, site = tmp_path / "engine.whl", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("engine/a.py", "engine/tests/b.py", "engine/c.so", "engine/d.bin"):
            archive.writestr(name, name)
    pack.unzip(wheel, ["*.py", "*.so"], ["engine/tests/*"], site, 90)
    found = sorted(str(file.relative_to(site)) for file in site.rglob("*") if file.is_file())
    assert found == ["engine/a.py", "engine/c.so"]


def test_what_the_machine_has_is_left_out() -> None:
    needed = ["py-cpuinfo==9.0.0", "PyYAML==6.0", "openai==3.54.0"]
    installed = "py_cpuinfo==8.0.0\npyyaml @ file:///wheels/pyyaml.whl\n\nopenai-harmony\n"
    assert pack.not_installed(needed, installed) == ["openai==3.54.0"]
    assert pack.not_installed(needed, "") == needed


def test_pieces_are_joined_again(tmp_path: Path) -> None:
    whole = tmp_path / "model.whl"
    content = bytes(range(256)) * 9
    whole.write_bytes(content)
    pieces = pack.split(whole, 1000)
    assert [piece.stat().st_size for piece in pieces] == [1000, 1000, 304]
    assert not whole.exists()
    script = Path(pack.__file__).with_name("unpack.sh")
    subprocess.run(["sh", str(script), str(tmp_path)], check=True)
    assert whole.read_bytes() == content


def test_stubs_of_packages_that_are_left_out_can_be_imported(tmp_path: Path) -> None:
    recipe = tomllib.loads((pack.ROOT / "scripts" / "gpu" / "sglang.toml").read_text())
    for name, text in recipe["stubs"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for file in recipe["copies"]:
        shutil.copy(pack.ROOT / file, tmp_path)
    program = """
import soundfile
from soundfile.any.module import Anything
from IPython.display import HTML
class Mine(soundfile.Base, Anything): pass
try:
    soundfile.run()
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert result.stdout == "run belongs to a package that is not installed here\n", result.stderr
