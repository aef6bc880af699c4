"""Processes that disturb a benchmark in a known way.

    with NOISES["neighbour"].processes():
        ...

Run as a program, this is one such process: `python noise.py PARENT BUSY PERIOD NICENESS [CORE]`.
It ends with its parent, however that one ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep

_STRIDE = 2000
"""Operations between two looks at the clock: well below a millisecond."""

_NAP = 0.05


@dataclass(frozen=True)
class Noise:
    """A kind of noise.

    Attributes:
        meaning: What happens, in a few words.
        count: Number of processes; None for one per core.
        busy: Seconds for which each is busy in every period; all are busy at the same time.
        period: Seconds of a period.
        niceness: Niceness of the processes.
        pinned: Whether the processes stay on the first core.
    """

    meaning: str
    count: int | None
    busy: float
    period: float
    niceness: int = 0
    pinned: bool = False

    @contextmanager
    def processes(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Run the processes until the block is left."""
        cores = sorted(os.sched_getaffinity(0))
        arguments = [str(os.getpid()), str(self.busy), str(self.period), str(self.niceness)]
        if self.pinned:
            arguments.append(str(cores[0]))
        command = [sys.executable, __file__, *arguments]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(len(cores) if self.count is None else self.count):
                started.append(subprocess.Popen(command))
            yield started
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


NOISES = {
    "quiet": Noise("nothing else runs", 0, 0, 1),
    "neighbour": Noise("one process takes a core for 4 s of every 8", 1, 4, 8, pinned=True),
    "bursts": Noise("four processes are busy for 1 s of every 5", 4, 1, 5),
    "low-priority": Noise("one process per core is always busy, at niceness 19", None, 1, 1, 19),
}
"""The kinds of noise by name."""


def disturb(busy: float, period: float, parent: int) -> None:
    """Alternate between work and sleep until the parent process has ended."""
    # The clock is the same for all processes, so they are busy together.
    while os.getppid() == parent:
        if monotonic() % period < busy:
            for number in range(_STRIDE):
                number * number
        else:
            sleep(_NAP)


def _main(parent: int, busy: float, period: float, niceness: int, core: int | None) -> None:
    os.nice(niceness)
    if core is not None:
        os.sched_setaffinity(0, {core})
    disturb(busy, period, parent)


if __name__ == "__main__":
    given = sys.argv[1:]
    _main(
        int(given[0]),
        float(given[1]),
        float(given[2]),
        int(given[3]),
        int(given[4]) if given[4:] else None,
    )
