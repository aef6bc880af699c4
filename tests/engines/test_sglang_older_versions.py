"""Older versions of SGLang, whose packages lie over the environment of the tested one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import newer_transformers
import pytest
from random_prompts import some_prompts
from sglang_runs import Answer, Case, run_sglang

pytestmark = [pytest.mark.full]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
CASES = [
    Case(some_prompts(8), GREEDY),
    Case(some_prompts(4, seed=4), GREEDY | {"frequency_penalty": 0.3}, together=False),
]


@pytest.fixture(params=["0.5.22", "0.5.20", "0.5.17"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def older(version: str, tmp_path: Path) -> dict[str, str]:
    """Variables with which a new Python imports and runs the older version."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(tmp_path / "wheel"), f"sglang=={version}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        pytest.skip(f"SGLang {version} cannot be downloaded: {done.stderr[-300:]}")
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with ZipFile(wheel) as package:
        package.extractall(tmp_path / "package")
    paths = [str(tmp_path / "package"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), **newer_transformers.ENVIRONMENT}


def test_tokens_equal_plain_decoding(
    version: str,
    older: dict[str, str],
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
) -> None:
    settings = {"variables": older, "disable_overlap_schedule": True}
    plain, _ = run_sglang(tiny_llama, CASES, drafted=False, **settings)
    drafted, log = run_sglang(tiny_llama, CASES, **settings)
    assert f"; {version} is untested" in log
    for without, with_trees in zip(plain, drafted, strict=True):
        assert with_trees.tokens == without.tokens
        proves_drafting(with_trees)
