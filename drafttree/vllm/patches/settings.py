"""Sets attributes of vLLM's objects."""

from __future__ import annotations

from typing import Any

from drafttree.vllm.versions import unknown


def set_attributes(owner: Any, **values: Any) -> dict[str, Any]:
    """Set attributes that an object of the engine must have, and return their old values."""
    for name in values:
        if not hasattr(owner, name):
            raise unknown(f"{type(owner).__name__} has no {name}")
    given = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    return given
