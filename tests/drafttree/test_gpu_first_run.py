"""The script of the first run on a GPU goes on after failures, and leaves what came before."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

SCRIPT = Path("scripts/gpu/first_run.sh")
ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
    *arctic_inference*) exit 1 ;;
    *"cli model"*) echo downloading; echo /models/small ;;
    *tests/kernels*) exit 3 ;;
    *doctor*) sleep 60 ;;
esac
"""


def test_every_step_runs_is_recorded_and_packed(tmp_path: Path) -> None:
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "found"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["sh", str(SCRIPT), str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": str(python), "CALLS": str(calls), "FIRST_RUN_SECONDS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line.split("\t") for line in (out / "steps.tsv").read_text().splitlines()[1:]]
    statuses = {name: int(status) for name, status, _ in lines}
    assert len(statuses) == len(lines)
    assert statuses["doctor"] == 124
    assert statuses["kernels"] == 3
    assert {name for name, status in statuses.items() if status} == {"doctor", "kernels"}
    engines = {"vllm-eager", "vllm-graphs", "vllm-v2-same-80", "vllm-ngram", "sglang-speed"}
    engines.add("attention-routes")
    assert engines <= statuses.keys()
    assert "vllm-suffix" not in statuses
    for name in statuses:
        assert (out / f"{name}.log").exists()
    benches = [line for line in calls.read_text().splitlines() if " bench " in line]
    assert len(benches) > 8
    assert all("--model /models/small" in line for line in benches)
    with tarfile.open(f"{out}.tar.gz") as packed:
        assert {f"found/{name}.log" for name in statuses} <= {*packed.getnames()}
    assert (out / "steps.tsv").read_text() in done.stdout


def test_the_folder_must_be_given() -> None:
    done = subprocess.run(["sh", str(SCRIPT)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "first_run.sh OUT" in done.stderr


def test_its_files_and_tests_exist() -> None:
    words = (ROOT / SCRIPT).read_text().split()
    paths = {word for word in words if word.startswith(("tests/", "scripts/")) and "/" in word}
    assert len(paths) > 4
    for path in paths:
        assert (ROOT / path).exists(), path
