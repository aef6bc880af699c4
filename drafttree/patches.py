"""Description of a patch to an engine; each host's `patches.py` lists all of its patches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """A part of an engine that is replaced or set.

    Attributes:
        target: What is replaced or set: `module:name` or `module:Class.attribute`.
        when: When it is replaced, and for how long.
        reason: Why the engine cannot do without it.
    """

    target: str
    when: str
    reason: str
