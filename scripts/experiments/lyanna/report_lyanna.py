"""Summarise the measurements of Lyanna: tables for docs/benchmarks.md, and a plot.

    python -m scripts.experiments.lyanna.report_lyanna results/lyanna_acceptance.json \\
        --variants VARIANTS.json --times results/lyanna_draft_time.json \\
        --speed results/lyanna_speed.json --plot results/lyanna.png

Needs matplotlib.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.experiments.common import heading, row

Report = dict[str, Any]


def acceptance_table(report: Report) -> None:
    """Print the tokens per step of every drafter in every setting."""
    drafters = report["drafters"]
    settings = dict.fromkeys(name for found in drafters.values() for name in found)
    settings.pop("greedy_chain")
    heading("", *drafters)
    for name in settings:
        cells = []
        for found in drafters.values():
            one = found.get(name)
            cells.append(
                f"{one['mean_accepted_tokens']:.2f} ± {one['standard_error']:.2f} "
                f"({one['nodes_a_step']:.1f} draft tokens)"
                if one
                else ""
            )
        row(name, *cells)


def variants_table(report: Report) -> None:
    """Print conditional acceptance of chains, and tokens per step of trees, by variant.

    Each figure is a mean over seeds, followed by the mean difference from the complete drafter and
    its standard error over the seeds.
    """
    runs: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, found in report["drafters"].items():
        variant, _, seed = name.rpartition("-")
        runs[variant][seed] = found
    heading("variant", "step 1", "step 2", "step 3", "tokens per step, 12 draft tokens")
    for variant, seeds in runs.items():
        cells = []
        for pick in (*map(_chain, range(3)), _twelve):
            values = [pick(found) for found in seeds.values()]
            base = [pick(runs["lyanna"][seed]) for seed in seeds]
            differences = [value - other for value, other in zip(values, base, strict=True)]
            text = f"{statistics.mean(values):.3f}"
            if variant != "lyanna" and len(values) > 1:
                spread = statistics.stdev(differences) / len(values) ** 0.5
                text += f" ({statistics.mean(differences):+.3f} ± {spread:.3f})"
            cells.append(text)
        row(variant, *cells)


def _chain(step: int) -> Any:
    return lambda found: found["greedy_chain"]["conditional"][step]


def _twelve(found: Report) -> float:
    value: float = found["12 nodes"]["mean_accepted_tokens"]
    return value


def times_table(report: Report) -> None:
    """Print the drafting times of Lyanna and EAGLE."""
    heading("requests", "depth", "way", "forward", "head", "sampling", "all, ms", "lower by")
    for run in report["runs"]:
        for way, parts in run["ms"].items():
            lower = f"{run['lower_by']:.0%}" if way == "lyanna" else ""
            times = (f"{parts[part]:.2f}" for part in ("forward", "head", "sampling", "all"))
            row(str(run["requests"]), str(run["depth"]), way, *times, lower)


def speed_table(report: Report) -> None:
    """Print the figures of each `drafttree bench` run.

    The last column is the decode speedup over the first run in the same engine: the mean over the
    categories of tasks, with its standard error.
    """
    heading(
        *("run", "tokens per step", "forward of a tree", "of a chain", "drafting"),
        *("decode speedup", "with prefill", "over the first"),
    )
    firsts: dict[str, Report] = {}
    for name, run in report["runs"].items():
        first = firsts.setdefault(run["engine"], run)
        single = [f"{one['decode_speedup']:.2f}" for one in run["repetitions"]]
        costs = (
            f"{run[cost]:.2f} ({run['cost_tokens']} tokens)" if cost in run else ""
            for cost in ("verify_cost", "chain_cost")
        )
        share = f"{run['draft_time_share']:.0%}" if "draft_time_share" in run else ""
        logs = [
            math.log(found["decode_speedup"] / first["per_category"][category]["decode_speedup"])
            for category, found in run["per_category"].items()
        ]
        mean, error = statistics.mean(logs), statistics.stdev(logs) / len(logs) ** 0.5
        row(
            *(name, f"{run['mean_accepted_tokens']:.2f}", *costs, share),
            f"{run['decode_speedup']:.2f} ({', '.join(single)})",
            f"{run['speedup']:.2f}",
            "" if run is first else f"{math.exp(mean):.2f} ± {math.exp(mean) * error:.2f}",
        )


def plot(acceptance: Report, times: Report, file: Path) -> None:
    """Plot tokens per step by number of draft tokens, and draft time by part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, found in acceptance["drafters"].items():
        points = [
            (int(setting.split()[0]), one["mean_accepted_tokens"], one["standard_error"])
            for setting, one in found.items()
            if setting.endswith(" nodes") and setting.split()[0].isdigit()
        ]
        sizes, tokens, errors = zip(*points, strict=True)
        left.errorbar(sizes, tokens, yerr=errors, marker="o", capsize=3, label=name)
    left.set_xlabel("draft tokens")
    left.set_ylabel("tokens per step")
    left.legend()
    labels, parts = [], defaultdict(list)
    for run in times["runs"]:
        for way, found in run["ms"].items():
            labels.append(f"{way}\n{run['requests']} x depth {run['depth']}")
            for part in ("forward", "head", "sampling"):
                parts[part].append(found[part])
    bottom = [0.0] * len(labels)
    for part, values in parts.items():
        right.bar(labels, values, bottom=bottom, label=part)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    right.set_ylabel("ms per draft tree")
    right.tick_params(axis="x", labelsize=6)
    right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(
    acceptance: Path,
    variants: Annotated[Path, typer.Option(help="Output of `measure_lyanna.py` for the variants.")],
    times: Annotated[Path, typer.Option(help="Output of `time_drafting.py`.")],
    speed: Annotated[Path, typer.Option(help="Reports of `drafttree bench`, under `runs`.")],
    plot_file: Annotated[Path, typer.Option("--plot", help="PNG.")],
) -> None:
    """Print the tables, and plot."""
    reports = [json.loads(file.read_text()) for file in (acceptance, variants, times, speed)]
    acceptance_table(reports[0])
    variants_table(reports[1])
    times_table(reports[2])
    speed_table(reports[3])
    plot(reports[0], reports[2], plot_file)


if __name__ == "__main__":
    typer.run(main)
