"""Lay the Python files of another version of vLLM over an installed build for CPUs.

    python -m scripts.hosts.overlay SOURCE FOLDER
    PYTHONPATH=FOLDER python ...

So a version of which there is no build for CPUs yet can be run on one, as long as its Python files
can use the compiled libraries of the installed version. SOURCE is a wheel of vLLM, for any device,
or the folder of its package in an unpacked one.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from zipfile import ZipFile

import typer

PACKAGE = "vllm"
COMPILED = ("*.so", "__pycache__", "*.pyc")
NATIVE = (".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".so")
"""Endings of files that only a GPU needs, in a wheel."""


def make_overlay(source: Path, folder: Path, build: Path) -> str:
    """Make a folder that, before all others on Python's path, is another version of vLLM.

    Args:
        source: A wheel, or the folder of the package in an unpacked one or in a source release.
        folder: The folder to make; what is in it already is replaced.
        build: The folder of the installed package with the compiled libraries.

    Returns:
        The version of `source`.

    Raises:
        FileNotFoundError: `source` is no vLLM, or `build` has no compiled libraries.
    """
    libraries = [each for each in sorted(build.rglob("*.so")) if each.is_file()]
    if not libraries:
        raise FileNotFoundError(f"{build} has no compiled libraries")
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / PACKAGE
    if source.is_dir():
        shutil.copytree(source, package, ignore=shutil.ignore_patterns(*COMPILED))
    else:
        with ZipFile(source) as wheel:
            wheel.extractall(
                folder,
                [
                    name
                    for name in wheel.namelist()
                    if name.startswith(f"{PACKAGE}/") and not name.endswith(NATIVE)
                ],
            )
    version = _version(package)
    for library in libraries:
        place = package / library.relative_to(build)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(library.resolve(), place)
    # By the version of the installed distribution the engine knows for which device it was built.
    info = folder / f"{PACKAGE}-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}+cpu\n"
    )
    return version


def installed() -> Path:
    """The folder of the installed package.

    Raises:
        FileNotFoundError: vLLM is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("vLLM is not installed")
    return Path(spec.origin).parent


def _version(package: Path) -> str:
    file = package / "_version.py"
    found = file.exists() and re.search(r"version = ['\"]([\d.]+)", file.read_text())
    if not found:
        raise FileNotFoundError(f"{file} does not name a version")
    return found[1]


def main(
    source: Annotated[Path, typer.Argument(help="A wheel, or the folder of its package.")],
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    build: Annotated[
        Path | None, typer.Option(help="Folder of the package whose libraries are used.")
    ] = None,
) -> None:
    """Make the folder, and print the version that it has."""
    try:
        print(make_overlay(source, folder, build or installed()))
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
