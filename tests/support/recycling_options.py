"""Options of Token Recycling that tests compare with plain decoding, by name."""

from __future__ import annotations

import math
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "the paper's static tree": {"tree": "static"},
    "another static tree": {"tree": "branch:4-3-2"},
    "dynamic, few nodes": {"nodes": 3},
    "dynamic, many nodes": {"nodes": 200},
    "dynamic, without hot start": {"nodes": 31, "hot_start": False},
    "dynamic, primed": {"nodes": 31, "prime": True, "prime_seconds": math.inf},
    "dynamic, tables by request": {"nodes": 31, "sharing": "request"},
}
