"""Recording of the calls to a drafter: the forwards it may measure, and verified tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VARIABLE = "TESTS_DRAFTER_CALLS"
"""Names the file that `record` writes, in the environment of an engine's process."""


def record(file: str) -> None:
    """Write the calls of `profile` and `on_verified` to a file. Called in an engine's process.

    Recorded are RSD's drafters, and others that do not override these methods.
    """
    from drafttree.budget import measure_forwards
    from drafttree.drafter import Drafter
    from rsd_plugin import RsdDrafter

    calls: dict[str, Any] = {"seconds": {}, "emitted": {}}

    def recording(kind: Any) -> None:
        profile_itself, on_verified_itself = kind.profile, kind.on_verified

        def profile(self: Drafter, measure_forward: Any, max_tokens: int) -> None:
            calls["seconds"] = measure_forwards(measure_forward, max_tokens)
            profile_itself(self, measure_forward, max_tokens)

        def on_verified(self: Drafter, slots: Any, trees: Any, verified: Any) -> None:
            counts = (verified.emitted >= 0).sum(1).tolist()
            for slot, count in zip(slots.tolist(), counts, strict=True):
                calls["emitted"][slot] = calls["emitted"].get(slot, 0) + count
            Path(file).write_text(json.dumps(calls))
            on_verified_itself(self, slots, trees, verified)

        kind.profile, kind.on_verified = profile, on_verified

    for kind in (Drafter, RsdDrafter):
        recording(kind)


def recorded(file: Path) -> tuple[dict[int, float], dict[int, int]]:
    """Seconds of forwards by number of tokens, and the number of emitted tokens by slot."""
    calls = json.loads(file.read_text())
    seconds, emitted = (
        {int(key): value for key, value in calls[name].items()} for name in ("seconds", "emitted")
    )
    return seconds, emitted
