"""Every deprecated name works, warns once, is documented, and goes when its time has come."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import drafttree
from drafttree import deprecation
from drafttree.deprecation import Deprecation
from drafttree.method import installed_methods
from lyanna_plugin.training.command import FORMER_START
from recycle_plugin.config import FORMER_DRAFTING

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("drafttree", "kernels", "lyanna_plugin", "recycle_plugin", "rsd_plugin")
METHODS = {method.title: method for method in installed_methods().values()}


@pytest.fixture(scope="module")
def listed() -> tuple[Deprecation, ...]:
    """The names in the documentation's table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "docs")
        return importlib.import_module("generate").DEPRECATED


def test_each_listed_name_still_works_and_warns(
    listed: tuple[Deprecation, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deprecation, "_WARNED", set())
    # `tests/lyanna_plugin/test_command.py` tests the other one.
    for each in (name for name in listed if name.of in METHODS):
        method = METHODS[each.of]
        former, instead = (dict([pair.split("=")]) for pair in (each.name, each.instead))
        caplog.clear()
        assert method.parse(former) == method.parse(instead)
        assert caplog.messages == [
            f"{each.name} of {each.of} is deprecated and will go in drafttree {each.gone_in}: "
            f"use {each.instead}"
        ]


def test_every_deprecation_in_the_code_is_listed(listed: tuple[Deprecation, ...]) -> None:
    """Whatever the packages say is deprecated is a `Deprecation`, and all of these are listed."""
    made = set()
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text())
        calls = [each.func for each in ast.walk(tree) if isinstance(each, ast.Call)]
        if any(isinstance(call, ast.Name) and call.id == "Deprecation" for call in calls):
            made.add(file.relative_to(ROOT).as_posix())
        if file != Path(deprecation.__file__):
            texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
            said = [text for text in texts if isinstance(text, str) and "deprecated" in text]
            assert not said, f"{file} warns without a Deprecation: {said}"
    assert made == {"recycle_plugin/config.py", "lyanna_plugin/training/command.py"}
    assert set(listed) == {*FORMER_DRAFTING.values(), FORMER_START}


def test_the_table_is_in_the_documentation(listed: tuple[Deprecation, ...]) -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    for each in listed:
        row = (f"`{each.name}`", each.of, f"`{each.instead}`", each.since, each.gone_in)
        assert f"| {' | '.join(row)} |" in page


def test_a_name_goes_one_minor_version_after_it_was_deprecated(
    listed: tuple[Deprecation, ...],
) -> None:
    """As CONTRIBUTING.md promises; when the version is reached, the name has to be removed."""

    def parts(version: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", version)))

    for each in listed:
        major, minor, _ = parts(each.since)
        assert parts(each.gone_in) == (major, minor + 1, 0)
        assert parts(each.since) <= parts(drafttree.__version__) < parts(each.gone_in)
