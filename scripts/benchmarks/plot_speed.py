"""Plot the speedup of a method over plain decoding by batch size.

    python scripts/benchmarks/plot_speed.py results/*-cpu/*-auto-batch-*.json \\
        --plot results/recycling_speed.png

Reads reports of `drafttree bench` and draws one line for each engine, method and data type:
medians, with all repetitions as points, prefill included. Needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drafttree.bench.engine_process import TITLES


def lines(runs: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Group the runs by setting, then by batch size.

    Raises:
        ValueError: Two runs have the same setting and batch size.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        options = ", ".join(f"{name} {value}" for name, value in run["options"].items())
        words = (TITLES[run["engine"]], run["method"], options, run["dtype"], run["cpu"])
        line = found.setdefault(", ".join(word for word in words if word), {})
        if run["batch_size"] in line:
            raise ValueError(f"two runs of batch size {run['batch_size']}: {' '.join(words)}")
        line[run["batch_size"]] = run
    return found


def main(
    runs: Annotated[list[Path], typer.Argument(help="JSON of `drafttree bench`.")],
    plot: Annotated[Path, typer.Option(help="PNG.")],
) -> None:
    """Plot the runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.axhline(1, color="grey", linewidth=0.8)
    for title, line in lines([json.loads(file.read_text()) for file in runs]).items():
        sizes = sorted(line)
        (drawn,) = axes.plot(
            sizes, [line[size]["speedup"] for size in sizes], marker="o", label=title
        )
        for size in sizes:
            each = [repetition["speedup"] for repetition in line[size]["repetitions"]]
            axes.plot([size] * len(each), each, "_", color=drawn.get_color())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second, relative to plain decoding")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(plot, dpi=120)


if __name__ == "__main__":
    typer.run(main)
