"""What is supported of SGLang: its versions and attention backends; needs no engine."""

from __future__ import annotations

import re

TESTED = "0.5.23"

FIRST = (0, 5, 17)
LAST = (0, 5, 23)
"""SGLang's plugin interface changes from release to release, so only versions that were run, or lie
between such versions, are supported."""

UNSERVED = (0, 5, 19)
"""The version that gives plugins its arguments as the user gave them, in part without values."""

CPU_BACKEND = "torch_native"
"""Attention backend for draft trees on a CPU. SGLang branches on this name in several places, so
tree attention is registered under it and not under a name of its own."""

CUDA_BACKENDS = ("triton", "flashinfer", "fa3")
"""SGLang's own attention backends with which drafts are verified; the first is used in place of
others. FlashAttention 3 (`fa3`) verifies trees with pages of one token only."""


def is_tested(version: str) -> bool:
    """Whether a version, whichever device it was built for, is the one that the tests use."""
    return version.partition("+")[0] == TESTED


def is_supported(version: str, older_versions: bool) -> bool:
    """Whether a version serves a kind of drafter.

    Args:
        version: SGLang's version, which may name the device it was built for, as in `0.5.23+cpu`.
        older_versions: What the kind declares in `HostSupport.older_versions`.
    """
    parts = _parts(version)
    return is_tested(version) or (older_versions and FIRST <= parts <= LAST and parts != UNSERVED)


def is_newer(version: str) -> bool:
    """Whether a version is newer than the last supported one."""
    return _parts(version) > LAST


def window() -> str:
    """The range of supported versions, for messages."""
    first, last, unserved = (".".join(map(str, version)) for version in (FIRST, LAST, UNSERVED))
    return f"{first} to {last} except {unserved}"


def _parts(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split(".")[:3])) if found else ()


def unknown(reason: str) -> RuntimeError:
    """The error for an SGLang that differs from the supported ones; `reason` says where."""
    return RuntimeError(
        f"drafttree does not support this SGLang: {reason}. Install SGLang {TESTED}, or leave "
        "--speculative-algorithm out"
    )
