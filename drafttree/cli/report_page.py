"""The runs of a folder as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from drafttree.bench.run_files import BenchRun
from drafttree.cli.page import html_page
from drafttree.cli.report_plots import by_batch_size, by_run, by_task, plot

_FIGURES = (
    ("plain tokens/s", "baseline_tokens_per_second", ".1f"),
    ("tokens/s", "tokens_per_second", ".1f"),
    ("speedup", "speedup", ".2f"),
    ("decode", "decode_speedup", ".2f"),
    ("tokens/step", "mean_accepted_tokens", ".2f"),
)

_STYLE = """<style>
svg { background: #ffffff; border-radius: 6px; max-width: 100%; height: auto; }
td { vertical-align: top; white-space: nowrap; }
th:nth-child(2), td:nth-child(2), th:last-child, td:last-child { text-align: left; }
</style>
"""


def page(folder: Path, runs: Sequence[BenchRun], skipped: Mapping[Path, str]) -> str:
    """The page as HTML: a section for each set of conditions.

    Args:
        folder: The folder, for the title.
        runs: The runs in it.
        skipped: The files that are no runs, with the reason for each.

    Raises:
        ImportError: matplotlib is not installed.
    """
    title = f"Runs in {folder.resolve().name}"
    groups: dict[tuple[str, ...], list[BenchRun]] = {}
    for run in runs:
        groups.setdefault(run.conditions, []).append(run)
    parts = [
        _STYLE,
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{len(runs)} runs of drafttree bench under {len(groups)} sets of '
        "conditions. Each speedup compares a method with plain decoding in the same run; prefill "
        "is included, except under “decode”. Small marks are repetitions.</p>",
    ]
    for number, (conditions, members) in enumerate(groups.items(), 1):
        parts += _section(f"c{number}", conditions, members)
    if skipped:
        parts.append("<h2>Files that are no runs</h2><ul>")
        parts += [
            f"<li><code>{escape(str(file))}</code>: {escape(reason)}</li>"
            for file, reason in skipped.items()
        ]
        parts.append("</ul>")
    return html_page(title, "\n".join(parts))


def _section(name: str, conditions: Iterable[str], runs: Sequence[BenchRun]) -> list[str]:
    parts = [f"<h2>{escape(' · '.join(conditions))}</h2>", _table(runs)]
    for title, draw in (
        ("By method", by_run),
        ("By kind of task", by_task),
        ("By batch size", by_batch_size),
    ):
        if svg := plot(draw, runs, f"{name}-{draw.__name__}"):
            parts += [f"<h3>{title}</h3>", svg]
    return parts


def _table(runs: Sequence[BenchRun]) -> str:
    waves = [run.num_waves for run in runs]
    cut = [run.report.cut_prompts for run in runs]
    columns = [
        ("run", [str(run.number) for run in runs]),
        ("method", [run.setting for run in runs]),
        ("batch size", [str(run.report.batch_size) for run in runs]),
        ("temperature", [f"{run.report.temperature:g}" for run in runs]),
        ("new tokens", [str(run.report.max_new_tokens) for run in runs]),
        ("prompts", [str(run.report.prompts) for run in runs]),
        *([("waves", list(map(str, waves)))] if max(waves) > 1 else []),
        *([("cut prompts", list(map(str, cut)))] if any(cut) else []),
        *(
            (heading, [_figure(getattr(run.report, name), form) for run in runs])
            for heading, name, form in _FIGURES
        ),
        ("identical", [f"{run.report.identical}/{run.report.prompts}" for run in runs]),
        ("ties", [str(run.report.ties) for run in runs]),
        ("file", [str(run.file) for run in runs]),
    ]
    rows = [_row("th", [heading for heading, _ in columns])]
    rows += [_row("td", cells) for cells in zip(*(cells for _, cells in columns), strict=True)]
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _row(kind: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
