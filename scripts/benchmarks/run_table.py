"""Names and a Markdown table of bench runs that differ in a few settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttree.bench.engine_process import TITLES

_FIGURES = (
    ("tokens per step", "mean_accepted_tokens", ".2f"),
    ("MBSU", "mbsu", ".2f"),
    ("forward of a tree / of one token", "verify_cost", ".2f"),
    ("drafting", "draft_time_share", ".0%"),
    ("speedup", "speedup", ".2f"),
    ("decode speedup", "decode_speedup", ".2f"),
    ("tokens per second", "tokens_per_second", ".1f"),
    ("plain", "baseline_tokens_per_second", ".1f"),
)
"""Headings, keys of a report, and forms; a column without figures is left out."""


_NUMBERS = ("batch_size", "temperature")


def _varied(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """Those of the names under which the rows do not all have the same."""
    return [name for name in names if any(row.get(name) != rows[0].get(name) for row in rows)]


def names(runs: Sequence[Mapping[str, Any]], by: str) -> list[str]:
    """A name for the setting of each run: its method, and what else differs between the runs.

    Args:
        runs: Reports of `drafttree bench`.
        by: `batch_size` or `temperature`, which is no part of the setting.
    """
    options = [run["options"] for run in runs]
    chosen = _varied(options, dict.fromkeys(option for each in options for option in each))
    engine = _varied(runs, ["engine"])
    machine = _varied(runs, ["dtype", "cpu"])
    numbers = _varied(runs, [key for key in _NUMBERS if key != by])
    return [
        ", ".join(
            [
                *(TITLES[run[key]] for key in engine),
                run["method"],
                *(f"{name} {run['options'][name]}" for name in chosen if name in run["options"]),
                *(run[key] for key in machine if key in run),
                *(f"{key.replace('_', ' ')} {run[key]:g}" for key in numbers),
            ]
        )
        for run in runs
    ]


def table(runs: Mapping[Path, Mapping[str, Any]], by: str) -> str:
    """A Markdown table of runs, by file, in the order of `by`: `batch_size` or `temperature`."""
    files = sorted(runs, key=lambda file: runs[file][by])
    reports = [runs[file] for file in files]
    figures = [row for row in _FIGURES if any(run.get(row[1]) is not None for run in reports)]
    heads = ["file", by.replace("_", " "), "method", *(head for head, _, _ in figures)]
    rows = [heads, ["---"] * len(heads)]
    for file, run, name in zip(files, reports, names(reports, by), strict=True):
        cells = [_cell(run, key, form) for _, key, form in figures]
        rows.append([f"`{file.name}`", f"{run[by]:g}", name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(run: Mapping[str, Any], key: str, form: str) -> str:
    """A figure, with those of its repetitions if there are several; empty if there is none."""
    value = run.get(key)
    if value is None:
        return ""
    each = [format(one[key], form) for one in run["repetitions"] if one.get(key) is not None]
    repeated = f" ({', '.join(each)})" if len(each) > 1 and "speedup" in key else ""
    return format(value, form) + repeated
