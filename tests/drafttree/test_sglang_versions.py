"""Which versions of SGLang serve which kinds of drafter."""

from __future__ import annotations

import pytest

from drafttree.sglang.versions import is_newer, is_supported, window


@pytest.mark.parametrize(
    ("version", "served", "served_by_tested_only"),
    [
        ("0.5.23", True, True),
        ("0.5.23+cpu", True, True),
        ("0.5.17", True, False),
        ("0.5.22", True, False),
        ("0.5.20.post1", True, False),
        ("0.5.19", False, False),
        ("0.5.9", False, False),
        ("0.5.24", False, False),
        ("0.6.0rc1", False, False),
        ("main", False, False),
    ],
)
def test_older_versions_serve_the_kinds_that_declare_it(
    version: str, served: bool, served_by_tested_only: bool
) -> None:
    assert is_supported(version, older_versions=True) is served
    assert is_supported(version, older_versions=False) is served_by_tested_only


@pytest.mark.parametrize(
    ("version", "newer"),
    [("0.5.24", True), ("1.0", True), ("0.5.23.post1", False), ("0.5.3", False)],
)
def test_versions_after_the_last_are_newer(version: str, newer: bool) -> None:
    assert is_newer(version) is newer


def test_messages_name_the_range() -> None:
    assert window() == "0.5.17 to 0.5.23 except 0.5.19"
