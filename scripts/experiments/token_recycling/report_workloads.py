"""Tabulate and plot the workloads that `ablate_recycling.py` replayed, beside the peers.

    python -m scripts.experiments.token_recycling.report_workloads RESULTS --plot workloads.png \\
        --setting "dynamic primed" --base "dynamic cold primed"

Each row is a workload and a wave, each column a number of draft tokens. `--column SETTING:NODES`
adds a column. In brackets is the gain over the base setting with as many draft tokens, and its
standard error by a paired bootstrap over the chats. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.experiments.common import heading, row
from scripts.experiments.token_recycling.replay_results import Run, gain, read_runs

Key = tuple[str, int]
"""A setting and its number of draft tokens."""

PEERS = ("n-gram", "suffix")


def by_workload(runs: list[Run]) -> dict[str, dict[Key, Run]]:
    """The finished runs, by workload and wave."""
    found: dict[str, dict[Key, Run]] = {}
    peers = [run for run in runs if run["setting"] in PEERS]
    for run in runs:
        if run["prompts_done"] < run["limit"] or run["setting"] in PEERS:
            continue
        same = found.setdefault(_title(run), {})
        same[run["setting"], run["nodes"]] = run
        for peer in peers:
            # Peers are replayed one request at a time, without foreign text.
            if _title({**run, "batch": 1, "foreign": 0}) == _title(peer):
                same[peer["setting"], peer["nodes"]] = peer
    return found


def _title(run: Run) -> str:
    parts = [run["kind"] if run["kind"] in ("edit", "agent") else Path(run["prompts"]).stem]
    if run["kind"] == "reworded":
        parts.append("reworded" if run["wave"] > 1 else "originals")
    parts.append(f"{run['limit']} chats")
    if run["batch"] > 1:
        parts.append(f"batch {run['batch']}")
    if run["foreign"]:
        parts.append(f"{run['foreign']:,} foreign tokens")
    return ", ".join([*parts, f"wave {run['wave']}"])


def table(found: dict[str, dict[Key, Run]], columns: dict[str, Key], base: str | None) -> None:
    """Print tokens per step by workload and number of draft tokens."""
    heading("workload", *columns)
    for title, runs in found.items():
        cells = []
        for key in columns.values():
            run, before = runs.get(key), runs.get((base or "", key[1]))
            text = f"{run['mean_accepted_tokens']:.2f} ± {run['standard_error']:.2f}" if run else ""
            cells.append(text + _difference(run, before))
        row(title, *cells)


def peers_table(found: dict[str, dict[Key, Run]], columns: dict[str, Key]) -> None:
    """Print the peers' tokens per step with their draft tokens per step, and the gain over suffix
    decoding in each column."""
    heading("workload", *PEERS, *(f"{column} over suffix" for column in columns))
    for title, runs in found.items():
        of_peers = {name: run for (name, _), run in runs.items() if name in PEERS}
        cells = []
        for name in PEERS:
            peer = of_peers.get(name)
            cells.append(
                f"{peer['mean_accepted_tokens']:.2f} [{peer['nodes_a_step']:.1f}]" if peer else ""
            )
        for key in columns.values():
            cells.append(_difference(runs.get(key), of_peers.get("suffix")).strip(" ()"))
        row(title, *cells)


def _difference(run: Run | None, base: Run | None) -> str:
    if run is None or base is None:
        return ""
    more, error = gain(run, base)
    return f" ({more:+.2f} ± {error:.2f})"


def plot(found: dict[str, dict[Key, Run]], settings: list[str], file: Path) -> None:
    """Plot tokens per step by draft tokens per step, one panel for each workload and wave."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(3, len(found))
    down = -(-len(found) // across)
    figure, panels = pyplot.subplots(
        down, across, figsize=(5 * across, 4 * down), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(found) :]:
        panel.set_visible(False)
    for panel, (title, runs) in zip(panels.flat, found.items(), strict=False):
        for name in (*settings, *PEERS):
            points = sorted(
                (run["nodes_a_step"], run["mean_accepted_tokens"], run["standard_error"])
                for (setting, _), run in runs.items()
                if setting == name
            )
            if points:
                drafts, tokens, errors = zip(*points, strict=True)
                panel.errorbar(drafts, tokens, yerr=errors, marker="o", capsize=3, label=name)
        panel.set_title(title, fontsize=8)
        panel.set_xlabel("draft tokens per step")
        panel.set_ylabel("tokens per step")
        panel.legend(fontsize=7)
    figure.savefig(file, dpi=120)


def main(
    results: Path,
    plot_file: Annotated[Path, typer.Option("--plot", help="PNG.")],
    setting: Annotated[str, typer.Option(help="The setting to tabulate.")] = "dynamic primed",
    base: Annotated[str | None, typer.Option(help="The setting to compare it with.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="SETTING:NODES, a further column; may be repeated.")
    ] = None,
) -> None:
    """Print the tables, and plot."""
    found = by_workload(read_runs(results))
    sizes = sorted({nodes for runs in found.values() for name, nodes in runs if name == setting})
    columns = {f"{nodes} draft tokens": (setting, nodes) for nodes in sizes}
    for each in column or []:
        name, _, nodes = each.rpartition(":")
        columns[f"{name}, {nodes}"] = (name, int(nodes))
    table(found, columns, base)
    peers_table(found, columns)
    others = [name for name, _ in columns.values()]
    plot(found, list(dict.fromkeys([setting, *([base] if base else []), *others])), plot_file)


if __name__ == "__main__":
    typer.run(main)
