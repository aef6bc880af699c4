"""The ways in which Token Recycling drafts, for tests that hold each against plain decoding."""

from __future__ import annotations

from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "the paper's tree": {"tree": "static"},
    "a tree of one's own": {"tree": "branch:4-3-2"},
    "grown, few nodes": {"nodes": 3},
    "grown, many nodes": {"nodes": 200},
    "grown, forgetful": {"nodes": 31, "hot_start": False},
    "grown, primed": {"nodes": 31, "prime": True},
    "grown, nothing shared": {"nodes": 31, "sharing": "request"},
}
"""The options of each."""
