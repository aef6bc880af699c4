"""Plot the speedup of methods over plain decoding by batch size or temperature, and tabulate it.

    python -m scripts.benchmarks.plot_speed results/*-cpu/bfloat16-auto-batch-*.json \\
        results/*-cpu/float32-auto-batch-*.json --plot results/recycling_speed.png
    python -m scripts.benchmarks.plot_speed results/vllm-cpu/rsd-*.json --by temperature \\
        --plot results/rsd_speed.png

Reads reports of `drafttree bench` and draws one line for each engine, method with its options, data
type and processor: medians, with all repetitions as marks, prefill included. A Markdown table of
the same runs goes to standard output. Needs matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.benchmarks.run_table import names, table


class By(StrEnum):
    """What the runs are ordered by."""

    batch_size = "batch-size"
    temperature = "temperature"

    @property
    def words(self) -> str:
        """Its name for people."""
        return self.value.replace("-", " ")


def lines(runs: Sequence[dict[str, Any]], by: By) -> dict[str, dict[float, dict[str, Any]]]:
    """Group the runs by setting, then by batch size or temperature.

    Raises:
        ValueError: Two runs have the same setting, batch size and temperature.
    """
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for run, name in zip(runs, names(runs, by.name), strict=True):
        line = found.setdefault(name, {})
        place = run[by.name]
        if place in line:
            raise ValueError(f"two runs of {name} have {by.words} {place}")
        line[place] = run
    return found


def main(
    runs: Annotated[list[Path], typer.Argument(help="JSON of `drafttree bench`.")],
    plot: Annotated[Path, typer.Option(help="PNG.")],
    by: Annotated[By, typer.Option(help="What the runs are ordered by.")] = By.batch_size,
) -> None:
    """Plot the runs, and print their table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reports = {file: json.loads(file.read_text()) for file in runs}
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.axhline(1, color="grey", linewidth=0.8)
    places = set()
    for name, line in lines([*reports.values()], by).items():
        shown = sorted(line)
        places.update(shown)
        (drawn,) = axes.plot(
            shown, [line[place]["speedup"] for place in shown], marker="o", label=name
        )
        for place in shown:
            each = [repetition["speedup"] for repetition in line[place]["repetitions"]]
            axes.plot([place] * len(each), each, "_", color=drawn.get_color())
    if by is By.batch_size:
        axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(places))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(by.words)
    axes.set_ylabel("tokens per second, relative to plain decoding")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(plot, dpi=120)
    typer.echo(table(reports, by.name))


if __name__ == "__main__":
    typer.run(main)
