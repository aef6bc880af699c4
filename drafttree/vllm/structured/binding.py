"""Whether a model runner may draft for requests with structured output."""

from __future__ import annotations

from typing import Any

from drafttree.vllm import patches
from drafttree.vllm.structured.grammars import why_not


def no_bound_drafts(runner: Any) -> str | None:
    """Why requests with structured output are served without drafts; None if they are not."""
    if not patches.binds_trees(runner):
        chosen = runner.scheduler_config.scheduler_cls
        return f"scheduler_cls={chosen!r} does not follow trees: leave it out"
    return why_not()
