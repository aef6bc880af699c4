"""Which versions of SGLang serve which kinds of drafter."""

from __future__ import annotations

import pytest

from drafttree.sglang.versions import is_supported


@pytest.mark.parametrize(
    ("version", "served", "served_by_tested_only"),
    [
        ("0.5.23", True, True),
        ("0.5.23+cpu", True, True),
        ("0.5.17", True, False),
        ("0.5.22", False, False),
    ],
)
def test_the_older_version_serves_the_kinds_that_declare_it(
    version: str, served: bool, served_by_tested_only: bool
) -> None:
    assert is_supported(version, older_versions=True) is served
    assert is_supported(version, older_versions=False) is served_by_tested_only
