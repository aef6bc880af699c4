"""Our counts in the server's own account of itself, which SGLang offers no plugin a place in."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from drafttree.sglang.versions import unknown

if TYPE_CHECKING:
    from drafttree.sglang.worker import TreeWorker

KEY = "drafttree"
"""Where `Engine.get_server_info()["internal_states"]` holds the counts."""

SIGNATURE = ["self", "recv_req"]


def report_counters(worker: TreeWorker) -> None:
    """Add the worker's counts to what its scheduler says of itself.

    Called in the scheduler's process, which has one worker, once a method of ours is running; the
    scheduler looks the method up after that.

    Raises:
        RuntimeError: this is not the SGLang that we know.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.get_internal_state
    found = list(inspect.signature(original).parameters)
    if found != SIGNATURE:
        raise unknown(f"Scheduler.get_internal_state takes {found}, expected {SIGNATURE}")

    @functools.wraps(original)
    def get_internal_state(self: Any, recv_req: Any) -> Any:
        answer = original(self, recv_req)
        answer.internal_state[KEY] = worker.counters.as_dict()
        return answer

    Scheduler.get_internal_state = get_internal_state
