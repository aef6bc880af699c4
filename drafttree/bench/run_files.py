"""Finds the reports of bench runs in a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NEEDED = {
    "engine": str,
    "engine_version": str,
    "method": str,
    "model": str,
    "dtype": str,
    "device": str,
    "batch_size": int,
    "options": dict,
    "prompts": int,
    "identical": int,
    "ties": int,
    "per_category": dict,
    "repetitions": list,
}
"""Keys of a report, and the types of their values, by which it is known."""


@dataclass(frozen=True)
class BenchRun:
    """A run.

    Attributes:
        number: Its number on the page, from 1.
        file: Its file, relative to the folder.
        report: What `drafttree bench` reported.
    """

    number: int
    file: Path
    report: dict[str, Any]

    @property
    def conditions(self) -> tuple[str, ...]:
        """What runs must share to be compared: engine, model, number format and machine."""
        report = self.report
        runner = report.get("runner")
        return (
            f"{report['engine']} {report['engine_version']}" + (f", {runner}" if runner else ""),
            report["model"],
            report["dtype"],
            f"{report['device']}: {report.get('cpu', 'unknown processor')}",
            "eager" if report.get("eager") else "compiled",
        )

    @property
    def setting(self) -> str:
        """The method with its options, and its model runner if that is not plain decoding's."""
        options = self.report["options"].items()
        runner = self.report.get("method_runner")
        return " ".join(
            [
                self.report["method"],
                *(f"{name}={value}" for name, value in options),
                *([f"({runner})"] if runner else []),
            ]
        )

    @property
    def label(self) -> str:
        """The run's name in plots."""
        return f"{self.number}: {self.setting}, batch size {self.report['batch_size']}"


def find_runs(folder: Path) -> tuple[list[BenchRun], dict[Path, str]]:
    """The runs in a folder and in the folders in it.

    Returns:
        The runs, in the order of their files' names, and the JSON files that are no runs, with the
        reason for each.

    Raises:
        OSError: The folder cannot be read.
    """
    runs: list[BenchRun] = []
    skipped: dict[Path, str] = {}
    for path in sorted(folder.rglob("*.json")):
        file = path.relative_to(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            skipped[file] = f"cannot be read as JSON: {error}"
            continue
        given = content.get("runs") if isinstance(content, dict) else None
        reports = given if isinstance(given, list) and given else [content]
        if reason := next(filter(None, map(_why_no_report, reports)), None):
            skipped[file] = reason
            continue
        for report in reports:
            runs.append(BenchRun(len(runs) + 1, file, report))
    return runs, skipped


def _why_no_report(report: Any) -> str | None:
    """Why something is no report of a run; None if it is one."""
    if not isinstance(report, dict):
        return f"no report of drafttree bench: it is a {type(report).__name__}"
    for name, kind in _NEEDED.items():
        if not isinstance(report.get(name), kind):
            return f"no report of drafttree bench: it has no {name}"
    return None
