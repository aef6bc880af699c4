"""Summarise the output of `measure_rsd.py` in a results file and a plot.

    python -m scripts.experiments.rsd.report_rsd rsd.jsonl \\
        --title "TARGET, draft DRAFT" --output results/rsd_x.json

Needs matplotlib.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from scripts.experiments.rsd.shapes import BUDGETS, LENGTHS, shape

METHODS = (
    *("SD", "Block", "SpecTr", "GBV", "RSD-C", "RSD-S", "Traversal-C", "Traversal-S"),
    *("Top-C", "Top-S", "Best", "Greedy-C", "Greedy-S"),
)
MARKS = "osv^D"
RESAMPLES = 10_000


@dataclass(frozen=True)
class Sample:
    """The measurements of one sampling setting.

    Attributes:
        prompts: `[P]`, the prompt of each position.
        tokens: `[P, T]`, the expected tokens per step of each tree at each position.
        names: The names of the trees.
    """

    prompts: np.ndarray
    tokens: np.ndarray
    names: list[str]

    def column(self, name: str) -> np.ndarray:
        """The expected tokens per step of one tree, `[P]`."""
        return self.tokens[:, self.names.index(name)]

    def resampled(self, columns: np.ndarray) -> np.ndarray:
        """Means of `columns [P, C]` over prompts resampled with replacement, `[RESAMPLES, C]`."""
        _, index = np.unique(self.prompts, return_inverse=True)
        sums = np.zeros((index.max() + 1, columns.shape[1]))
        np.add.at(sums, index, columns)
        counts = np.bincount(index)
        drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
        return sums[drawn].sum(1) / counts[drawn].sum(1)[:, None]

    def figures(self, name: str, size_ratio: float) -> dict[str, Any]:
        """The figures of a tree, and its gains over others at the same positions.

        Block-verified chains are compared with ordinary ones, trees with RSD's of the same shape
        (recursive rejection), and all with chains of the same length and of the same size.
        """
        method, notation = name.split()
        num_draft_tokens, length = shape(notation)
        own = self.column(name)
        mean = float(own.mean())
        figures: dict[str, Any] = {
            "nodes": num_draft_tokens,
            "length": length,
            "block_efficiency": round(mean, 3),
            "standard_error": round(float(self.resampled(own[:, None]).std()), 3),
            "mbsu": round(mean / (length * size_ratio + 1), 3),
        }
        for key, other in (
            ("over_sd_of_length", f"SD {length}"),
            ("over_sd_of_nodes", f"SD {num_draft_tokens}"),
            ("over_block_of_length", f"Block {length}"),
            ("over_block_of_nodes", f"Block {num_draft_tokens}"),
            ("over_recursive", f"RSD-S {notation}"),
            ("over_recursive", f"RSD-C {notation}"),
        ):
            if other in self.names and method not in ("SD", other.split()[0]):
                gain = own - self.column(other)
                figures[key] = round(float(gain.mean()), 3)
                figures[f"{key}_error"] = round(float(self.resampled(gain[:, None]).std()), 3)
        return figures

    def best(self, names: list[str]) -> str:
        """The tree with the most expected tokens per step."""
        return max(names, key=lambda name: self.column(name).mean())


def trees_of(method: str, group: tuple[tuple[str, ...], ...], chain: int) -> list[str]:
    """The trees of a method in one group of equal length or size."""
    if method in ("SD", "Block"):
        return [f"{method} {chain}"]
    return [f"{method} {notation}" for notation in group[1 if method.endswith("-C") else 0]]


def plot(samples: dict[str, Sample], title: str, file: Path) -> None:
    """Plot the block efficiency of each method's best tree against length and against size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(samples), figsize=(4 * len(samples), 7), sharey="row", squeeze=False
    )
    for row, (groups, label) in enumerate(
        ((LENGTHS, "draft length"), (BUDGETS, "draft tokens verified"))
    ):
        for axis, (setting, sample) in zip(axes[row], samples.items(), strict=True):
            for number, method in enumerate(METHODS):
                best = {}
                for chain, group in groups.items():
                    measured = [
                        name for name in trees_of(method, group, chain) if name in sample.names
                    ]
                    if measured:
                        best[chain] = sample.best(measured)
                if not best:
                    continue
                columns = np.stack([sample.column(name) for name in best.values()], 1)
                axis.errorbar(
                    *(list(best), columns.mean(0)),
                    yerr=sample.resampled(columns).std(0),
                    **{"label": method, "marker": MARKS[number % len(MARKS)], "markersize": 4},
                    **{"capsize": 2, "color": f"C{number % 10}"},
                )
            axis.set(xlabel=label, title=setting, xticks=list(groups))
            axis.grid(alpha=0.3)
        axes[row][0].set_ylabel("block efficiency (tokens per step)")
    axes[0][0].legend(fontsize="x-small", ncols=2)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main(
    measured: Path,
    title: Annotated[str, typer.Option(help="Title of the plot.")],
    output: Annotated[Path, typer.Option(help="The JSON file; the plot is written beside it.")],
) -> None:
    """Write the results file and the plot."""
    conditions, *lines = [json.loads(line) for line in measured.read_text().splitlines()]
    places = [line for line in lines if "tokens" in line]
    names = sorted(places[0]["tokens"])
    samples = {
        setting: Sample(
            np.array([place["prompt"] for place in chosen]),
            np.array([[place["tokens"][name] for name in names] for place in chosen]),
            names,
        )
        for setting in dict.fromkeys(place["setting"] for place in places)
        if (chosen := [place for place in places if place["setting"] == setting])
    }
    report = {
        **conditions,
        "method": "expected tokens per step, summed exactly for trees sampled at positions in the "
        "target's own answers; standard errors by bootstrap over prompts",
        "settings": {
            setting: {
                "prompts": len(set(sample.prompts)),
                "places": len(sample.prompts),
                "trees": {
                    name: sample.figures(name, conditions["draft_size_ratio"])
                    for name in sorted(
                        names,
                        key=lambda name: (METHODS.index(name.split()[0]), *shape(name.split()[1])),
                    )
                },
            }
            for setting, sample in samples.items()
        },
    }
    output.write_text(json.dumps(report, indent=1) + "\n")
    plot(samples, title, output.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
