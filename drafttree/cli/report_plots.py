"""Plots of bench runs under the same conditions, as SVG for an HTML page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from itertools import compress
from statistics import median
from typing import TYPE_CHECKING

from drafttree.bench.run_files import BenchRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[[Sequence[BenchRun]], "Figure | None"]
"""Draws runs; None if there is nothing to draw."""

_SPEEDUP = "tokens per second, relative to plain decoding"
_WIDTH = 9.5
_LINE = 0.27
"""Width of a plot, and height of a line in it, in inches."""


def plot(draw: Draw, runs: Sequence[BenchRun], name: str) -> str:
    """A plot as an `svg` element; empty if there is nothing to draw.

    Args:
        draw: Draws it.
        runs: The runs.
        name: Unique among the plots of a page; the element's ids begin with it.
    """
    from matplotlib import rc_context

    text = StringIO()
    with (
        # Text stays text, dollar signs included, and the same figure has the same ids.
        rc_context(
            {
                "svg.fonttype": "none",
                "text.parse_math": False,
                "svg.hashsalt": name,
                "font.size": 9,
            }
        ),
        warnings.catch_warnings(),
    ):
        # The browser has its own fonts for the text.
        warnings.filterwarnings("ignore", message=r"(?s)Glyph .* missing from")
        if (figure := draw(runs)) is None:
            return ""
        blank = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", bbox_inches="tight", metadata=blank)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)


def by_run(runs: Sequence[BenchRun]) -> Figure | None:
    """The speedup of each run, with those of its repetitions as marks; None without times."""
    timed = [(run, speedup) for run in runs if (speedup := run.report.speedup) is not None]
    if not timed:
        return None
    figure, axes = _figure(1.2 + _LINE * len(timed))
    places = range(len(timed))
    axes.barh(places, [speedup for _, speedup in timed], color="tab:blue", height=0.6)
    for place, (run, _) in enumerate(timed):
        each = _numbers(repetition.speedup for repetition in run.report.repetitions)
        axes.plot(each, [place] * len(each), "|", color="black")
    axes.set_yticks(places, [run.label for run, _ in timed])
    axes.set_ylim(len(timed) - 0.4, -0.6)
    _finish(axes)
    return figure


def by_task(runs: Sequence[BenchRun]) -> Figure | None:
    """The speedup of each run by kind of task; None without times."""
    kinds = sorted({kind for run in runs for kind in run.report.per_category})
    lines = [(run, [_speedup(run, kind) for kind in kinds]) for run in runs]
    lines = [(run, values) for run, values in lines if any(value is not None for value in values)]
    if not lines:
        return None
    figure, axes = _figure(1.4 + _LINE * len(kinds) + 0.18 * len(lines))
    for number, (run, values) in enumerate(lines):
        known = [(value, place) for place, value in enumerate(values) if value is not None]
        axes.plot(
            [value for value, _ in known],
            [place for _, place in known],
            "os^vDP*X<>"[number // 10 % 10],
            color=f"C{number % 10}",
            label=run.label,
        )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.grid(axis="y", color="0.9")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.55 / figure.get_figheight() - 0.08))
    _finish(axes)
    return figure


def by_batch_size(runs: Sequence[BenchRun]) -> Figure | None:
    """The speedup of each setting by batch size; None if none was run with several.

    Runs that were asked something else are on lines of their own.
    """
    lines: dict[tuple[str, tuple[str, ...]], dict[int, list[float]]] = {}
    for run in runs:
        if (speedup := run.report.speedup) is not None:
            sizes = lines.setdefault((run.setting, run.asked), {})
            sizes.setdefault(run.report.batch_size, []).append(speedup)
    several = {line: sizes for line, sizes in lines.items() if len(sizes) > 1}
    if not several:
        return None
    differs = [len(set(each)) > 1 for each in zip(*(asked for _, asked in several), strict=True)]
    figure, axes = _figure(3.8)
    for number, ((setting, asked), sizes) in enumerate(several.items()):
        label = ", ".join([setting, *compress(asked, differs)])
        shown = sorted(sizes)
        line = [median(sizes[size]) for size in shown]
        axes.plot(shown, line, "o-", color=f"C{number % 10}", label=label)
        for size in shown:
            axes.plot([size] * len(sizes[size]), sizes[size], "_", color=f"C{number % 10}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("batch size")
    axes.set_ylabel(_SPEEDUP)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _speedup(run: BenchRun, kind: str) -> float | None:
    figures = run.report.per_category.get(kind)
    return None if figures is None else figures.speedup


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    return figure, figure.add_subplot()


def _finish(axes: Axes) -> None:
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_xlabel(_SPEEDUP)
