"""Markdown tables of the figures of record, from reports of `drafttree bench`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from drafttree.bench.engine_process import TITLES

ALL = "all"
METHOD_NAMES = {
    "ngram": "n-gram",
    "suffix": "suffix",
    "token-recycling": "Token Recycling",
    "lyanna": "Lyanna",
}
_WAVES = ("", ", second wave")


def conditions(report: dict[str, Any]) -> str:
    """What the runs of one table share, as a line of text."""
    runner = f", model runner {report['runner'].upper()}" if report.get("runner") else ""
    return (
        f"{TITLES[report['engine']]} {report['engine_version']}{runner}, {report['model']}, "
        f"{report['dtype']}, {'eager' if report['eager'] else 'compiled'}, "
        f"{report['device']}: {report.get('cpu', 'unknown processor')}, "
        f"at most {report['max_new_tokens']} tokens a turn, repetitions: {report['repeat']}"
    )


def tables(reports: Iterable[dict[str, Any]]) -> str:
    """One table for each set of conditions and concurrency.

    Rows are kinds of task, and columns the speedup of each method in both waves, prefill included.
    A report without waves counts as the first. The greatest speedup of a wave is in bold.

    Raises:
        ValueError: Two reports are of one method under the same conditions.
    """
    groups: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for report in reports:
        group = groups.setdefault((conditions(report), report["batch_size"]), {})
        if report["method"] in group:
            raise ValueError(
                f"two runs of {report['method']} with {report['batch_size']} at a time: "
                f"{conditions(report)}"
            )
        group[report["method"]] = report
    lines: list[str] = []
    previous = None
    for (shared, concurrency), group in groups.items():
        if shared != previous:
            lines += [f"{shared}.", ""]
            previous = shared
        lines += [f"Requests at a time: {concurrency}", "", *_table(list(group.values())), ""]
    return "\n".join(lines)


def _table(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The table of runs that differ in their method alone."""
    names = [_name(report) for report in reports]
    heads = [name + wave for wave in _WAVES for name in names]
    rows = [
        f"| kind of task | plain, tokens/s | {' | '.join(heads)} |",
        "|---" * (2 + len(heads)) + "|",
    ]
    kinds = sorted({kind for report in reports for kind in report["per_category"]})
    for kind in (*kinds, ALL):
        plain = [_figures(report, 0, kind).get("baseline_tokens_per_second") for report in reports]
        known = [rate for rate in plain if rate is not None]
        cells = [kind.replace("_", " "), f"{median(known):.1f}" if known else ""]
        for wave in range(len(_WAVES)):
            cells += _speedups([_figures(report, wave, kind).get("speedup") for report in reports])
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _name(report: dict[str, Any]) -> str:
    """The method, and its model runner if that is not plain decoding's."""
    runner = report.get("method_runner")
    name = METHOD_NAMES.get(report["method"], report["method"])
    return f"{name} ({runner.upper()})" if runner else name


def _figures(report: dict[str, Any], wave: int, kind: str) -> dict[str, Any]:
    """The figures of a wave and kind of task; empty if the report has none."""
    waves = report.get("waves") or [report]
    if wave >= len(waves):
        return {}
    if kind == ALL:
        return dict(waves[wave])
    return dict(waves[wave].get("per_category", {}).get(kind, {}))


def _speedups(values: Sequence[float | None]) -> list[str]:
    """Speedups in two decimals, the greatest in bold if there are several."""
    written = ["" if value is None else f"{value:.2f}" for value in values]
    best = max(filter(None, written), key=float, default="")
    several = len([each for each in written if each]) > 1
    return [f"**{each}**" if several and each == best else each for each in written]
