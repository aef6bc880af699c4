"""What the GPU was asked for, by line of drafttree's own code."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
_CODE = tuple(
    str(ROOT / folder) + "/"
    for folder in ("drafttree", "kernels", "lyanna_plugin", "recycle_plugin", "rsd_plugin")
)


def place() -> str:
    """The innermost line of drafttree's code that is running; "elsewhere" if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_CODE):
            line = linecache.getline(file, frame.f_lineno).strip()
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} {line}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@dataclass(frozen=True)
class Wait:
    """Something for which the host waits.

    Attributes:
        what: What it is.
        where: The line of drafttree's code.
    """

    what: str
    where: str


@dataclass
class Record:
    """What the GPU was asked for.

    Attributes:
        kernels: Launches of Triton kernels, by name.
        operations: PyTorch's operations that are more than views or allocations, by name.
        copies_in: Copies from the host, by line.
        copies_out: Copies to the host, by line.
        waits: What the host waited for.
        lines: Launches and operations, by name and line.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    copies_in: Counter[str] = field(default_factory=Counter)
    copies_out: Counter[str] = field(default_factory=Counter)
    waits: list[Wait] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)

    def launched(self, name: str) -> None:
        """Count the launch of a kernel."""
        self.kernels[name] += 1
        self.lines[f"{name}: {place()}"] += 1

    def operated(self, name: str) -> None:
        """Count an operation."""
        self.operations[name] += 1
        self.lines[f"{name}: {place()}"] += 1

    def totals(self) -> dict[str, int]:
        """How many there were of each."""
        return {
            "kernels": self.kernels.total(),
            "operations": self.operations.total(),
            "copies in": self.copies_in.total(),
            "copies out": self.copies_out.total(),
            "waits": len(self.waits),
        }

    def report(self) -> str:
        """Everything, the most frequent lines first, for the message of a failed budget."""
        lines = [f"{count} {line}" for line, count in self.lines.most_common()]
        copies = [f"in: {line}" for line in self.copies_in.elements()]
        copies += [f"out: {line}" for line in self.copies_out.elements()]
        waits = [f"wait: {wait.what} at {wait.where}" for wait in self.waits]
        return "\n".join([str(self.totals()), *lines, *copies, *waits])
