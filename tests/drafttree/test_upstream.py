"""The proposals to vLLM in `docs/upstream` apply to the vLLM that is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "upstream"
PATCHES = {"0.32": "custom_class-0.32.patch", "0.33": "custom_class.patch"}


def apply(patch: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "apply", *arguments, str(FOLDER / patch)],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def files_of(patch: str) -> list[str]:
    """Files of the engine that a patch changes."""
    return re.findall(r"^--- a/(vllm/\S+)", (FOLDER / patch).read_text(), re.M)


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder with copies of the installed files that the proposal changes."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    package = Path(spec.origin).parent
    for file in files_of("custom_class.patch"):
        copy = tmp_path / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package.parent / file, copy)
    return tmp_path


def installed() -> str:
    """The minor version of the engine, from the file that it is built with."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "_version.py").read_text()
    found = re.search(r"version = ['\"](\d+\.\d+)", text)
    assert found is not None
    return found[1]


def test_the_proposal_applies_to_the_installed_engine(copies: Path) -> None:
    if installed() not in PATCHES:
        pytest.skip(f"the proposal is for {', '.join(PATCHES)}")
    before = {file: (copies / file).read_text() for file in files_of("custom_class.patch")}
    applied = apply(PATCHES[installed()], copies)
    assert applied.returncode == 0, applied.stderr
    for file, text in before.items():
        changed = (copies / file).read_text()
        assert changed != text, file
        compile(changed, file, "exec")


def test_a_proposal_that_no_longer_applies_is_noticed(copies: Path) -> None:
    file = copies / "vllm/v1/worker/gpu/spec_decode/__init__.py"
    file.write_text(file.read_text().replace("is not supported yet", "is unknown"))
    for patch in PATCHES.values():
        assert apply(patch, copies, "--check").returncode != 0


def test_both_versions_load_the_class_in_the_same_way() -> None:
    """What differs is the configuration, which decides on the runner."""
    changes = []
    for patch in PATCHES.values():
        files = re.split(r"^diff --git ", (FOLDER / patch).read_text(), flags=re.M)[1:]
        changes.append(
            {
                text.split()[0]: [line for line in text.splitlines() if line[:1] in "+-"][2:]
                for text in files
                if "/config/" not in text.split()[0] and text.startswith("a/vllm")
            }
        )
    assert len(changes[0]) == 2
    assert changes[0] == changes[1]


def test_the_proposal_has_a_test() -> None:
    text = (FOLDER / "custom_class.patch").read_text()
    assert "+++ b/tests/v1/spec_decode/test_custom_speculator.py" in text
