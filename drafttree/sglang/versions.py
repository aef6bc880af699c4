"""Which SGLang is supported; needs no engine."""

from __future__ import annotations

TESTED = "0.5.23"


def is_tested(version: str) -> bool:
    """Whether a version, whatever it was built for, is the one that the tests run.

    Only that one is supported: a plugin's side of SGLang changes from release to release.
    """
    return version.partition("+")[0] == TESTED
