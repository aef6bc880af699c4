"""What an engine's processes hold: memory, file handles, children, and our objects by type."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "TESTS_REPORT_HELD"
"""Environment variable of an engine's process that adds `held` to its worker's counters."""

OURS = ("drafttree", "recycle_plugin", "rsd_plugin", "lyanna_plugin", "tree_kernels")
SHARED_MEMORY = Path("/dev/shm")


def held() -> dict[str, int]:
    """Number of our live objects by type, and of the elements of the containers in them."""
    gc.collect()
    counts: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if kind.__module__.partition(".")[0] not in OURS:
            continue
        name = f"{kind.__module__}.{kind.__qualname__}"
        counts[name] += 1
        for field, value in getattr(each, "__dict__", {}).items():
            if isinstance(value, dict | list | set | frozenset | tuple):
                counts[f"{name}.{field}"] += len(value)
    return dict(counts)


def enable() -> None:
    """Let SGLang's scheduler report, beside its worker's counters, what it holds."""
    from drafttree.metrics import Counters

    stock = Counters.as_dict

    def with_held(self: Counters) -> dict[str, int]:
        found = {f"ours: {name}": count for name, count in held().items()}
        return stock(self) | found | _of_sglang()

    Counters.as_dict = with_held  # type: ignore[method-assign]


def _of_sglang() -> dict[str, int]:
    schedulers = [each for each in gc.get_objects() if type(each).__name__ == "Scheduler"]
    (scheduler,) = schedulers
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return {
        "used KV slots": allocator.size - allocator.available_size() - cache.evictable_size(),
        "locked KV slots": cache.protected_size(),
        "used request slots": scheduler.req_to_token_pool.size
        - scheduler.req_to_token_pool.available_size(),
        "waiting requests": len(scheduler.waiting_queue),
    }


def processes() -> list[int]:
    """This process and all that descend from it, except `multiprocessing`'s resource tracker."""
    found = [os.getpid()]
    for pid in found:
        for task in _listed(f"/proc/{pid}/task"):
            children = _read(f"/proc/{pid}/task/{task}/children").split()
            found += [int(each) for each in children if _counts(each)]
    return found


def resources() -> dict[str, int]:
    """Resident memory in KiB, open files and processes, of all of `processes`."""
    pids = processes()
    pages = sum(int((_read(f"/proc/{pid}/statm").split() or [0, 0])[1]) for pid in pids)
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "open files": sum(len(_listed(f"/proc/{pid}/fd")) for pid in pids),
        "processes": len(pids),
    }


def shared_memory() -> set[str]:
    """Names of the files in shared memory."""
    return {*_listed(str(SHARED_MEMORY))}


def left_by(names: set[str]) -> Counter[str]:
    """How many of the files in shared memory no living process has in use, by what they are for."""
    left = (names & shared_memory()) - used_by(filter(str.isdigit, os.listdir("/proc")))
    return Counter(map(_purpose, left))


def _purpose(name: str) -> str:
    """The name without its random parts and numbers."""
    return re.sub(r"(?<=^sem\.mp-)\w+|[0-9a-f]{8,}|\d+", "#", name)


def used_by(pids: Iterable[int | str]) -> set[str]:
    """Names of the files in shared memory that processes have open or mapped."""
    used: set[str] = set()
    for pid in pids:
        links = [f"/proc/{pid}/fd/{each}" for each in _listed(f"/proc/{pid}/fd")]
        paths = [_target(link) for link in links]
        paths += [line.split(maxsplit=5)[-1] for line in _read(f"/proc/{pid}/maps").splitlines()]
        used |= {Path(path).name for path in paths if path.startswith(f"{SHARED_MEMORY}/")}
    return used


def _counts(pid: str) -> bool:
    # Processes that have ended, and are not waited for yet, have no command line.
    command = _read(f"/proc/{pid}/cmdline")
    return bool(command) and "resource_tracker" not in command


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
