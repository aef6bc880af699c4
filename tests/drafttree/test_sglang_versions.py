"""Which methods are served in which SGLang."""

from __future__ import annotations

import pytest

from drafttree.sglang.versions import is_supported


@pytest.mark.parametrize(
    ("version", "without_model", "with_model"),
    [
        ("0.5.23", True, True),
        ("0.5.23+cpu", True, True),
        ("0.5.17", True, False),
        ("0.5.22", False, False),
    ],
)
def test_the_older_one_serves_methods_without_a_model(
    version: str, without_model: bool, with_model: bool
) -> None:
    assert is_supported(version, takes_model=False) is without_model
    assert is_supported(version, takes_model=True) is with_model
