"""What a host patches in its engine, as data: each host's `patches.py` lists all of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One thing of the engine that is replaced.

    Attributes:
        target: What is replaced: `module:Class.attribute`, or the object in words where it is not
            a class attribute.
        when: When it is replaced, and for how long.
        reason: Why the engine cannot do without it.
    """

    target: str
    when: str
    reason: str
