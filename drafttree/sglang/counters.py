"""Our counts in the server's own account of itself, which SGLang offers no plugin a place in."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafttree.sglang.worker import TreeWorker

KEY = "drafttree"
"""Where `Engine.get_server_info()["internal_states"]` holds the counts."""

SIGNATURE = ["self", "state"]


def report_counters(worker: TreeWorker) -> None:
    """Add the worker's counts to what its scheduler says of speculation.

    Called in the scheduler's process, which has one worker, once a method of ours is running.

    Raises:
        RuntimeError: this is not the SGLang that we know.
    """
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )

    original = SchedulerInternalStateController._add_speculative
    found = list(inspect.signature(original).parameters)
    if found != SIGNATURE:
        raise RuntimeError(
            "drafttree does not know this SGLang: SchedulerInternalStateController."
            f"_add_speculative takes {found}, expected {SIGNATURE}. Install SGLang 0.5.23, or "
            "leave the speculative algorithm out"
        )

    @functools.wraps(original)
    def _add_speculative(self: Any, state: dict[str, Any]) -> None:
        original(self, state)
        state[KEY] = worker.counters.as_dict()

    SchedulerInternalStateController._add_speculative = _add_speculative
