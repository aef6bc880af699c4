"""A tag makes a release of the version that the package and the changelog name."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import drafttree
from drafttree.cli import app

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
VERSION = drafttree.__version__
NEWEST = re.compile(r"^## (\d.+) - \d{4}-\d\d-\d\d$", re.M)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """The script that the workflow runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module("release")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the two files that name the version, with nothing left to be released."""
    (tmp_path / "drafttree").mkdir()
    shutil.copy(ROOT / "drafttree" / "__init__.py", tmp_path / "drafttree")
    text = f"## Unreleased\n\n## {VERSION} - 2026-11-26\n\nNew.\n\n## 0.0.1 - x\n\nOld.\n"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{text}")
    return tmp_path


def test_the_changelogs_newest_release_is_the_packages_version() -> None:
    assert NEWEST.findall((ROOT / "CHANGELOG.md").read_text())[0] == VERSION


def test_the_command_prints_the_version() -> None:
    printed = CliRunner().invoke(app, ["--version"])
    assert (printed.exit_code, printed.output) == (0, f"drafttree {VERSION}\n")


def test_the_version_has_one_place() -> None:
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.M)
    assert 'version = { attr = "drafttree.__version__" }' in (ROOT / "pyproject.toml").read_text()


def test_a_tag_gives_the_notes_of_its_version(
    release: ModuleType, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.notes(f"v{VERSION}", copy) == "New.\n"
    assert release.package_version() == VERSION
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased = text.split("## Unreleased\n")[1].split("\n## ")[0].strip()
    assert release.main([f"v{VERSION}"]) == bool(unreleased)
    printed = capsys.readouterr()
    assert ("### Added" in printed.out) is not bool(unreleased)


@pytest.mark.parametrize(
    ("tag", "replaced", "by", "message"),
    [
        ("v9.9.9", "", "", "set __version__ in drafttree/__init__.py"),
        (VERSION, "", "", f"tag v{VERSION}"),
        (
            "v" + VERSION,
            "## Unreleased\n",
            "## Unreleased\n\n- Left.\n",
            "empty section Unreleased",
        ),
        ("v" + VERSION, "## Unreleased\n\n", "", "empty section Unreleased"),
        ("v" + VERSION, f"## {VERSION} - 2026-11-26\n\nNew.\n\n", "", "newest section"),
        ("v" + VERSION, " - 2026-11-26", "", "YYYY-MM-DD"),
        ("v" + VERSION, "New.\n", "", "write what changed"),
    ],
)
def test_a_tag_that_is_not_ready_is_refused(
    release: ModuleType, copy: Path, tag: str, replaced: str, by: str, message: str
) -> None:
    file = copy / "CHANGELOG.md"
    assert replaced in file.read_text()
    file.write_text(file.read_text().replace(replaced, by) if replaced else file.read_text())
    with pytest.raises(ValueError, match=re.escape(message)):
        release.notes(tag, copy)


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((WORKFLOWS / name).read_text())


def test_a_tag_runs_everything_before_it_is_released() -> None:
    jobs = workflow("release.yml")["jobs"]
    called = {job["uses"].rpartition("/")[2] for job in jobs.values() if "uses" in job}
    others = {file.name for file in WORKFLOWS.glob("*.yml")} - {"release.yml"}
    assert called == others
    groups = {workflow(name)["concurrency"]["group"] for name in called}
    assert len(groups) == len(called), "workflows of one group would cancel each other"
    assert not any("github.workflow" in group for group in groups)
    for name in called:
        # YAML reads the key `on` as true.
        assert "workflow_call" in workflow(name)[True]
    assert set(jobs["release"]["needs"]) == jobs.keys() - {"release"}
    assert "scripts/release.py" in str(jobs["version"]["steps"])
