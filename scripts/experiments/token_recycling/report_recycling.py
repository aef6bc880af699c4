"""Summarise the output of `ablate_recycling.py`: tables for docs/benchmarks.md, and a plot.

    python -m scripts.experiments.token_recycling.report_recycling \\
        results/recycling_ablation.json --plot results/recycling_ablation.png

Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.experiments.common import heading, row
from scripts.experiments.token_recycling.replay_results import Run, gain, read_runs

Runs = dict[tuple[str, int], Run]
"""The runs of one target and one set of prompts, by setting and number of draft tokens."""

LINES = (
    *("static", "static primed", "dynamic", "dynamic primed"),
    *("dynamic without bigram table primed", "dynamic without n-gram matches primed"),
    *("dynamic with fixed priors primed", "dynamic on a fixed mask primed"),
    *("dynamic accepted only primed", "dynamic cold"),
)
"""The settings that are plotted against the number of draft tokens."""


def groups(runs: list[Run]) -> dict[str, Runs]:
    """The finished runs, by target, prompts and answer length."""
    found: dict[str, Runs] = {}
    for run in runs:
        usual = (run["kind"], run["wave"], run["batch"], run["foreign"]) == ("prompts", 1, 1, 0)
        if run["prompts_done"] < run["limit"] or not usual:
            continue
        name = (
            f"{run['model']}, {run['prompts']}: {run['limit']} prompts, "
            f"{run['max_new_tokens']} tokens per turn"
        )
        found.setdefault(name, {})[run["setting"], run["nodes"]] = run
    return found


def base_of(setting: str) -> str | None:
    """The baseline of a setting: its family; `static` for `dynamic`, unprimed for primed."""
    family, _, rest = setting.partition(" ")
    primed = setting.endswith(" primed")
    if rest in ("", "primed"):
        return family if primed else {"dynamic": "static"}.get(family)
    return f"{family} primed" if primed else family


def settings_table(runs: Runs) -> None:
    """Print tokens per step by setting and number of draft tokens, with the gain in brackets."""
    sizes = sorted({size for _, size in runs})
    heading("setting", *(f"{size} draft tokens" for size in sizes))
    for setting in dict.fromkeys(name for name, _ in runs):
        cells = []
        for size in sizes:
            run = runs.get((setting, size))
            base = runs.get((base_of(setting) or "", size))
            text = f"{run['mean_accepted_tokens']:.2f} ± {run['standard_error']:.2f}" if run else ""
            if run and base:
                more, error = gain(run, base)
                text += f" ({more:+.2f} ± {error:.2f}, {more / base['mean_accepted_tokens']:+.0%})"
            cells.append(text)
        row(setting, *cells)


def categories_table(runs: Runs) -> None:
    """Print the tokens per step of the complete methods by category."""
    chosen = [key for key in runs if key[0].removesuffix(" primed") in ("static", "dynamic")]
    names = list(dict.fromkeys(name for key in chosen for name in runs[key]["categories"]))
    heading("category", *(f"{setting}, {size}" for setting, size in chosen))
    for name in names:
        row(name, *(f"{runs[key]['categories'][name]:.2f}" for key in chosen))


def plot(found: dict[str, Runs], file: Path) -> None:
    """Plot tokens per step by number of draft tokens, and of static trees by depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(found), 2, figsize=(12, 5 * len(found)), squeeze=False, width_ratios=(3, 2)
    )
    for (left, right), (title, runs) in zip(panels, found.items(), strict=True):
        for setting in LINES:
            points = sorted(
                (size, run["mean_accepted_tokens"], run["standard_error"])
                for (name, size), run in runs.items()
                if name == setting
            )
            if points:
                sizes, tokens, errors = zip(*points, strict=True)
                whole = setting.removesuffix(" primed") in ("static", "dynamic")
                left.errorbar(
                    *(sizes, tokens),
                    yerr=errors if whole else None,
                    marker="o" if whole else ".",
                    linestyle="-" if whole else "--",
                    capsize=3,
                    label=setting,
                )
        left.set_title(title, fontsize=8)
        left.set_xlabel("draft tokens")
        left.set_ylabel("tokens per step")
        left.legend(fontsize=7)
        for size in sorted({size for name, size in runs if name.startswith("static depth=")}):
            depths = sorted(
                (int(name.removeprefix("static depth=")), run["mean_accepted_tokens"])
                for (name, other), run in runs.items()
                if other == size and name.startswith("static depth=") and name[-1].isdigit()
            )
            if len(depths) > 1:
                right.plot(
                    *zip(*depths, strict=True), marker="o", label=f"static, {size} draft tokens"
                )
        right.set_xlabel("depth of the static tree")
        right.set_ylabel("tokens per step")
        if right.lines:
            right.legend(fontsize=7)
        right.set_visible(bool(right.lines))
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(
    results: Path,
    plot_file: Annotated[Path, typer.Option("--plot", help="PNG.")],
) -> None:
    """Print the tables, and plot."""
    found = groups(read_runs(results))
    for title, runs in found.items():
        typer.echo(f"\n{title}")
        settings_table(runs)
        categories_table(runs)
    plot(found, plot_file)


if __name__ == "__main__":
    typer.run(main)
