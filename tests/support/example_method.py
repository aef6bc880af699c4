"""Installs the example of docs/adding_a_method.md into a folder of its own."""

from __future__ import annotations

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
    return {"PYTHONPATH": str(site)}
