"""Which SGLang is supported; needs no engine.

A plugin's side of SGLang changes from release to release, so only what was run is supported.
"""

from __future__ import annotations

TESTED = "0.5.23"

OLDER = "0.5.17"
"""Serves methods that take no model; run by hand only."""


def is_tested(version: str) -> bool:
    """Whether a version, whatever it was built for, is the one that the tests run."""
    return version.partition("+")[0] == TESTED


def unknown(reason: str) -> RuntimeError:
    """The error for a host that is not as we know it; `reason` says in what."""
    return RuntimeError(
        f"drafttree does not know this SGLang: {reason}. Install SGLang {TESTED}, or leave the "
        "speculative algorithm out"
    )


def is_supported(version: str, takes_model: bool) -> bool:
    """Whether a version serves methods that take a draft model, or those that take none."""
    return is_tested(version) or (version.partition("+")[0] == OLDER and not takes_model)
