"""Which vLLM is supported; needs no engine."""

from __future__ import annotations

FIRST = (0, 26)
LAST = (0, 33)
TESTED = "0.32.0"


def is_supported(version: str) -> bool:
    """Whether a version is between the first and the last supported minor version."""
    minor = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return FIRST <= minor <= LAST


def is_tested(version: str) -> bool:
    """Whether a version, whatever it was built for, is the one that the tests run."""
    return version.partition("+")[0] == TESTED


def window() -> str:
    """The supported versions in words."""
    return f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
