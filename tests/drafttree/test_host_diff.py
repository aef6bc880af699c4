"""`scripts/hosts/diff.py`: what changed in the parts of an engine that drafttree uses."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from scripts.hosts.diff import table, used_of
from scripts.hosts.package import Package
from scripts.hosts.references import Reference, references

OURS = """
    from typing import Generic, TypeVar

    from engine import Runner, constant
    from engine.work import helper as help_with
    from engine import work

    T = TypeVar("T")

    class Middle(Runner, Generic[T]):
        def step(self): ...

    class Last(Middle[int]):
        def step(self): ...
        def start(self): ...
        def own(self): ...
"""

OLD = {
    "__init__.py": "from engine.runner import Runner\nfrom .runner import constant",
    "runner.py": '''
        from engine.work import Base

        constant = 1

        class Runner(Base):
            """A docstring."""

            def __init__(self):
                self.seats = 4

            def step(self, batch):
                """Steps."""
                return batch
        ''',
    "work.py": """
        class Base:
            def start(self): ...

        try:
            def helper(a): ...
        except ImportError:
            pass
        """,
}


@pytest.fixture
def used(tmp_path: Path) -> list[Reference]:
    source = tmp_path / "ours.py"
    source.write_text(textwrap.dedent(OURS))
    return references([source], "engine", ["engine.runner:Runner.seats"])


def package(folder: Path, files: dict[str, str]) -> Package:
    (folder / "engine").mkdir(parents=True)
    for name, text in files.items():
        (folder / "engine" / name).write_text(textwrap.dedent(text))
    return Package(folder / "engine")


@pytest.fixture
def old(tmp_path: Path) -> Package:
    return package(tmp_path / "old", OLD)


def test_uses_are_found_through_classes_of_our_own(used: list[Reference]) -> None:
    assert set(used) == {
        Reference("engine", "Runner", "imported"),
        Reference("engine", "Runner", "subclassed"),
        Reference("engine", "Runner.own", "overridden"),
        Reference("engine", "Runner.start", "overridden"),
        Reference("engine", "Runner.step", "overridden"),
        Reference("engine", "constant", "imported"),
        Reference("engine", "work", "imported"),
        Reference("engine.runner", "Runner.seats", "patched"),
        Reference("engine.work", "helper", "imported"),
    }


def test_the_same_version_and_other_docstrings_are_no_change(
    used: list[Reference], old: Package, tmp_path: Path
) -> None:
    files = OLD | {"runner.py": OLD["runner.py"].replace("Steps.", "Takes a step.")}
    shown = table(used, old, package(tmp_path / "new", files))
    # A method that the engine does not have is not counted.
    assert shown == "7 parts are the same.\n\n"


@pytest.mark.parametrize(
    ("file", "before", "after", "row"),
    [
        (
            "runner.py",
            "def step(self, batch)",
            "def step(self, batch, more: int | None)",
            "| `engine:Runner.step` | overridden | parameters: `self, batch` became "
            "`self, batch, more: int \\| None` |",
        ),
        (
            "runner.py",
            "return batch",
            "return list(batch)",
            "| `engine:Runner.step` | overridden | 1 lines removed, 1 added |",
        ),
        ("work.py", "def start", "def begin", "| `engine:Runner.start` | overridden | gone |"),
        ("work.py", "def helper", "def helped", "| `engine.work:helper` | imported | gone |"),
        (
            "runner.py",
            "self.seats = 4",
            "self.chairs = 4",
            "| `engine.runner:Runner.seats` | patched | gone |",
        ),
    ],
)
def test_a_change_is_shown(
    file: str,
    before: str,
    after: str,
    row: str,
    used: list[Reference],
    old: Package,
    tmp_path: Path,
) -> None:
    assert before in OLD[file]
    new = package(tmp_path / "new", OLD | {file: OLD[file].replace(before, after)})
    assert row in table(used, old, new).splitlines()


def test_everything_can_be_listed(used: list[Reference], old: Package) -> None:
    assert "| `engine:Runner.step` | overridden | the same |" in table(
        used, old, old, everything=True
    )


def test_names_are_found_through_imports_of_whole_modules(
    used: list[Reference], old: Package, tmp_path: Path
) -> None:
    moved = {
        "work.py": "from .other import *\nfrom .more import *",
        "other.py": "from .work import *",
        "more.py": OLD["work.py"],
    }
    new = package(tmp_path / "new", OLD | moved)
    assert table(used, old, new) == table(used, old, old)
    assert new.find("engine.work", "absent") is None


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"__init__\.py"):
        Package(tmp_path)


@pytest.mark.parametrize(
    ("engine", "part"),
    [
        ("vllm", ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._prepare_inputs")),
        ("sglang", ("sglang.srt.model_executor.model_runner", "ModelRunner.sample")),
    ],
)
def test_what_drafttree_uses_is_found(engine: str, part: tuple[str, str]) -> None:
    assert part in {(each.module, each.name) for each in used_of(engine)}
