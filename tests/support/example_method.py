"""Installs methods outside of drafttree, such as the example of docs/adding_a_method.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "prompt_lookup_tree"


def install_example(folder: Path) -> dict[str, str]:
    """Install the example package with pip, from a copy of its sources.

    Returns:
        The environment variables with which another process finds the package.
    """
    site = folder / "site"
    # pip builds in the source folder.
    source = shutil.copytree(EXAMPLE, folder / "source")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--disable-pip-version-check", "--target", str(site)),
            str(source),
        ],
        check=True,
    )
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def install_module(name: str, folder: Path) -> None:
    """Install a module that defines a method, beside the example and without pip.

    Args:
        name: Name of the module, which stands in the folder of this file, and of the method.
        folder: The folder to which the example was installed.
    """
    site = folder / "site"
    shutil.copy(Path(__file__).with_name(f"{name}.py"), site)
    metadata = site / f"{name}-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[drafttree.methods]\n{name} = {name}:METHOD\n")
