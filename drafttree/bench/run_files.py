"""Finds the reports of bench runs in a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Rate = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
"""None where times mean nothing, or nothing was counted."""


class RunFigures(BaseModel):
    """Figures of a run, of a kind of task or of a repetition; see `drafttree.bench.report`."""

    model_config = ConfigDict(strict=True, frozen=True)

    baseline_tokens_per_second: _Rate = None
    tokens_per_second: _Rate = None
    speedup: _Rate = None
    decode_speedup: _Rate = None
    mean_accepted_tokens: _Rate = None


class BenchReport(RunFigures):
    """What is shown of a report of `drafttree bench`, by which it is known."""

    engine: str
    engine_version: str
    runner: str | None = None
    method_runner: str | None = None
    method: str
    model: str
    dtype: str
    device: str
    cpu: str = "unknown processor"
    eager: bool = False
    batch_size: Annotated[_Count, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    options: dict[str, Any]
    max_new_tokens: _Count
    prompts: _Count
    identical: _Count
    ties: _Count
    cut_prompts: _Count = 0
    waves: list[RunFigures] = []
    per_category: dict[str, RunFigures]
    repetitions: list[RunFigures]


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
    report: BenchReport

    @property
    def conditions(self) -> tuple[str, ...]:
        """What runs must share to be compared: engine, model, number format and machine."""
        report = self.report
        return (
            f"{report.engine} {report.engine_version}"
            + (f", {report.runner}" if report.runner else ""),
            report.model,
            report.dtype,
            f"{report.device}: {report.cpu}",
            "eager" if report.eager else "compiled",
        )

    @property
    def setting(self) -> str:
        """The method with its options, and its model runner if that is not plain decoding's."""
        runner = self.report.method_runner
        return " ".join(
            [
                self.report.method,
                *(f"{name}={value}" for name, value in self.report.options.items()),
                *([f"({runner})"] if runner else []),
            ]
        )

    @property
    def num_waves(self) -> int:
        """How often all prompts were asked in a repetition."""
        return max(len(self.report.waves), 1)

    @property
    def asked(self) -> tuple[str, ...]:
        """What was asked of both sides: figures of runs with others are not averaged."""
        report = self.report
        return (
            f"temperature {report.temperature:g}",
            f"at most {report.max_new_tokens} new tokens",
            f"{report.prompts // self.num_waves} prompts",
            "1 wave" if self.num_waves == 1 else f"{self.num_waves} waves",
        )

    @property
    def label(self) -> str:
        """The run's name in plots."""
        return f"{self.number}: {self.setting}, batch size {self.report.batch_size}"


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
            reports = _reports(path)
        except ValueError as error:
            skipped[file] = str(error)
            continue
        for report in reports:
            runs.append(BenchRun(len(runs) + 1, file, report))
    return runs, skipped


def _reports(path: Path) -> list[BenchReport]:
    """The reports in a file.

    Raises:
        ValueError: It cannot be read as JSON, or something in it is no report.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # Plots have no lone surrogates: there are question marks in their place.
        content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read as JSON: {error}") from error
    given = content.get("runs") if isinstance(content, dict) else None
    reports = given if isinstance(given, list) and given else [content]
    try:
        return [BenchReport.model_validate(report) for report in reports]
    except ValidationError as error:
        raise ValueError(f"no report of drafttree bench: {_reason(error)}") from error


def _reason(error: ValidationError) -> str:
    """What is wrong first."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"it has no {where}"
    return f"{where}: {first['msg']}" if where else first["msg"]
