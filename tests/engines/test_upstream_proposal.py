"""The test of the proposal in `docs/upstream` passes in a copy of the engine that is changed so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import v2_on_cpu

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "upstream"
PATCHES = {"0.32": "custom_class-0.32.patch", "0.33": "custom_class.patch"}
TEST = "tests/v1/spec_decode/test_custom_speculator.py"


def test_the_proposed_test_passes(tmp_path: Path) -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    package = Path(spec.origin).parent
    version = re.search(r"version = ['\"](\d+\.\d+)", (package / "_version.py").read_text())
    assert version is not None
    if version[1] not in PATCHES:
        pytest.skip(f"the proposal is for {', '.join(PATCHES)}")
    # Links to the installed files, of which the changed ones are replaced by copies.
    shutil.copytree(
        package,
        tmp_path / "vllm",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    patch = FOLDER / PATCHES[version[1]]
    for name in re.findall(r"^--- a/(vllm/\S+)", patch.read_text(), re.M):
        (tmp_path / name).unlink()
        shutil.copy(package.parent / name, tmp_path / name)
    changed = ["git", "apply", str(patch)]
    test = ["git", "apply", f"--include={TEST}", str(FOLDER / "custom_class.patch")]
    for command in (changed, test) if version[1] == "0.32" else (changed,):
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "conftest.py").write_text("import v2_on_cpu\nv2_on_cpu.enable()\n")
    support = str(ROOT / "tests" / "support")
    environment = os.environ | v2_on_cpu.ENVIRONMENT
    environment |= {"PYTHONPATH": f"{tmp_path}:{support}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", TEST],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert "6 passed" in run.stdout
