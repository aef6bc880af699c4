"""Supported versions of vLLM; needs no engine."""

from __future__ import annotations

FIRST = (0, 26)
LAST = (0, 33)
TESTED = "0.32.0"

FIRST_V2 = (0, 32)
"""The first version whose V2 model runner has the functions that drafttree overrides."""


FIRST_RECURRENT = (0, 32)
"""The first version known to keep recurrent states right when a request has no drafts in a step."""


def is_supported(version: str) -> bool:
    """Whether a version is between the first and the last supported minor version."""
    return FIRST <= _minor(version) <= LAST


def serves_v2(version: str) -> bool:
    """Whether draft trees can be served with the V2 model runner of a version."""
    return FIRST_V2 <= _minor(version) <= LAST


def serves_recurrent_layers(version: str) -> bool:
    """Whether a version can verify drafts with recurrent layers beside attention."""
    return FIRST_RECURRENT <= _minor(version) <= LAST


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def is_tested(version: str) -> bool:
    """Whether a version, whichever device it was built for, is the one that the tests use."""
    return version.partition("+")[0] == TESTED


def window() -> str:
    """The range of supported versions, for messages."""
    return f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


def window_v2() -> str:
    """The range of versions whose V2 model runner is supported, for messages."""
    return f"{FIRST_V2[0]}.{FIRST_V2[1]} to {LAST[0]}.{LAST[1]}"


def unknown(reason: str) -> RuntimeError:
    """The error for an engine that differs from what drafttree was written for.

    Args:
        reason: What differs.
    """
    return RuntimeError(
        f"drafttree does not support this vLLM: {reason}. Install vLLM {TESTED}, or leave the "
        "speculative method out."
    )
