"""Whether a model runner may draft for requests with structured output."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from drafttree.vllm import patches
from drafttree.vllm.structured.grammars import why_not


def no_bound_drafts(runner: Any) -> str | None:
    """Why requests with structured output are served without drafts; None if they are not."""
    if not patches.binds_trees(runner):
        chosen = runner.scheduler_config.scheduler_cls
        return f"scheduler_cls={chosen!r} does not follow trees: leave it out"
    return why_not()


def not_in_schedulers_process(parallel: Any) -> str | None:
    """Why the scheduler cannot see what a worker drafts within a step; None if it can."""
    backend = parallel.distributed_executor_backend
    if parallel.world_size == 1 and backend in (None, "uni"):
        return None
    fix = (
        "set VLLM_ENABLE_V1_MULTIPROCESSING=0 and serve offline"
        if current_platform.is_cpu()
        else "serve on one device, without that option"
    )
    return (
        f"with distributed_executor_backend={backend!r} the worker runs in its own process, and "
        f"the scheduler does not see trees that are drafted within a step there: {fix}"
    )
