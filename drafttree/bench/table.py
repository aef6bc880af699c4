"""Tables of a run's figures for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

_ROWS = (
    ("new tokens", "baseline_new_tokens", "new_tokens", ",d"),
    ("decode steps", "baseline_steps", "steps", ",d"),
    (
        "tokens per decode step (mean accepted)",
        "baseline_mean_accepted_tokens",
        "mean_accepted_tokens",
        ".2f",
    ),
    ("tokens/s", "baseline_tokens_per_second", "tokens_per_second", ".1f"),
    ("speedup", None, "speedup", ".2f"),
    ("speedup of decode steps alone", None, "decode_speedup", ".2f"),
)
# Name of the row, name of the column in a comparison, key of the report.
_DRAFT_MODEL_ROWS = (
    ("block efficiency over memory-bound time (MBSU)", "MBSU", "mbsu"),
    ("share of the time spent drafting", "drafting", "draft_time_share"),
)
_COST_ROWS = (
    ("forward of {cost_tokens} tokens against 1: tree", "verify_cost"),
    ("forward of {cost_tokens} tokens against 1: chain", "chain_cost"),
    ("mean accepted / cost of the tree", "possible_decode_speedup"),
)

_EXPLAINED_HEADINGS = {
    "num_draft_tokens": "draft tokens",
    "predicted_ms": "model ms",
    "observed_ms": "real ms",
    "expected_tokens": "model tokens",
    "realised_tokens": "real tokens",
    "tokens_per_second": "tokens /s",
}


def figures_table(report: dict[str, Any]) -> Table:
    """Plain decoding and the method, side by side."""
    table = Table()
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column(str(report["method"]), justify="right")
    for name, plain, method, form in _ROWS:
        table.add_row(name, _cell(report, plain, form), _cell(report, method, form))
    for name, _, key in _DRAFT_MODEL_ROWS:
        if key in report:
            table.add_row(name, "", _cell(report, key, ".2f"))
    if "verify_cost" in report:
        for name, key in _COST_ROWS:
            table.add_row(name.format_map(report), "", _cell(report, key, ".2f"))
    identical = f"{report['identical']} of {report['prompts']}"
    if report["ties"]:
        identical += f", {report['ties']} ties"
    table.add_row("prompts with identical answers", "", identical)
    return table


def comparison_table(reports: list[dict[str, Any]]) -> Table:
    """Runs of a method with different options, one per row, each against its own plain run."""
    table = Table()
    first = reports[0]["options"]
    keys = dict.fromkeys(key for report in reports for key in report["options"])
    varied = [key for key in keys if any(r["options"].get(key) != first.get(key) for r in reports)]
    columns = [
        ("tokens/step", "mean_accepted_tokens"),
        *[(short, key) for _, short, key in _DRAFT_MODEL_ROWS if any(key in r for r in reports)],
        ("speedup", "speedup"),
        ("decode", "decode_speedup"),
    ]
    for key in varied:
        table.add_column(key, no_wrap=True)
    table.add_column("draft tokens", justify="right")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    table.add_column("identical", justify="right")
    for report in reports:
        counters = report["counters"]
        steps = counters.get("drafted_steps", 0)
        table.add_row(
            *(Text(str(report["options"].get(key, ""))) for key in varied),
            format(counters["draft_tokens"] / steps, ".1f") if steps else "",
            *(_cell(report, key, ".2f") for _, key in columns),
            f"{report['identical']}/{report['prompts']}",
        )
    return table


def category_table(report: dict[str, Any]) -> Table:
    """Figures of the method by category of prompt."""
    table = Table()
    table.add_column("category")
    for heading in ("prompts", "identical", "new tokens", "tokens/step", "speedup", "decode"):
        table.add_column(heading, justify="right")
    for category, figures in report["per_category"].items():
        table.add_row(
            Text(category),
            _cell(figures, "prompts", ",d"),
            _cell(figures, "identical", ",d"),
            _cell(figures, "new_tokens", ",d"),
            _cell(figures, "mean_accepted_tokens", ".2f"),
            _cell(figures, "speedup", ".2f"),
            _cell(figures, "decode_speedup", ".2f"),
        )
    return table


def waves_table(report: dict[str, Any], explain: bool) -> Table:
    """Figures by wave; to explain them, also how much was drafted."""
    # Narrow enough for 80 columns; values in a wider table would be truncated.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("wave")
    columns = [
        ("new tokens", "new_tokens", ",d"),
        ("plain tokens /s", "baseline_tokens_per_second", ".1f"),
        ("tokens /s", "tokens_per_second", ".1f"),
        ("tokens /step", "mean_accepted_tokens", ".2f"),
        ("speedup", "speedup", ".2f"),
        ("decode", "decode_speedup", ".2f"),
    ]
    waves = report["waves"]
    if explain and "drafted_share" in waves[0]:
        columns.append(("drafted", "drafted_share", ".0%"))
        columns.append(("draft tokens", "drafts_per_step", ".1f"))
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for number, figures in enumerate(waves, 1):
        table.add_row(str(number), *(_cell(figures, key, form) for _, key, form in columns))
    return table


def choices_table(report: dict[str, Any]) -> Table:
    """Why a scheduler chose its last 16 sizes; the report has more of them, and of each tier."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("draft tokens", "reason", "requests", "at most", "gain"):
        table.add_column(heading, justify="right")
    for row in report["choices"][-16:]:
        size, reason, requests = row["num_draft_tokens"], row["reason"], row["requests"]
        gain = _cell(row, "gain", ".2f")
        table.add_row(str(size), reason, str(requests), str(row["most"]), gain)
    return table


def explained_table(report: dict[str, Any]) -> Table:
    """How a method chose `num_draft_tokens`: the rows of its `explain()`."""
    # Narrow enough for 80 columns; values in a wider table would be truncated.
    table = Table(box=SIMPLE_HEAD, padding=0)
    rows = report["explained"]
    for key in rows[0] if rows else ():
        heading = _EXPLAINED_HEADINGS.get(key, key.replace("_", " "))
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        forms = {key: "d" if isinstance(value, int) else ".3g" for key, value in row.items()}
        table.add_row(*(_cell(row, key, form) for key, form in forms.items()))
    return table


def sources_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Acceptance by candidate source: the rows of `Drafter.acceptance`."""
    table = Table(caption="Draft tokens whose parent was accepted, by candidate source")
    table.add_column("source")
    for heading in ("tried", "accepted", "share"):
        table.add_column(heading, justify="right")
    for row in rows:
        counts = (f"{row['tried']:,d}", f"{row['hit']:,d}", f"{row['share']:.1%}")
        table.add_row(Text(row["source"]), *counts)
    return table


def _cell(figures: dict[str, Any], key: str | None, form: str) -> str:
    value = None if key is None else figures.get(key)
    return "" if value is None else format(value, form)
