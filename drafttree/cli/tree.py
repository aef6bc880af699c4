"""`drafttree tree`: what became of the drafts of a bench run, and the tree that fits it best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from drafttree.acceptance import MeasuredTree, Shares, fit, read_run, tokens_a_step
from drafttree.tree import BRANCHING, MAX_DEPTH, RankPath, StaticTree


def tree(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN.json]", help="A report of drafttree bench.")
    ] = None,
    alone: Annotated[
        str | None,
        typer.Option("--tree", help="Show a tree without a run: its file, or branch:4-2-1."),
    ] = None,
    fitted: Annotated[
        int | None,
        typer.Option("--fit", help="Fit the static tree of so many nodes to the run."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The file to write the fitted tree to, for option tree.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the static tree that is shown into this PNG file.")
    ] = None,
) -> None:
    """Show how often each node of the draft tree was accepted, or fit a better tree."""
    try:
        if (run is None) == (alone is None):
            raise ValueError("give either a bench run or --tree")
        if (fitted is None) != (output is None):
            raise ValueError("--fit and --output belong together: a size, and the file to write")
        if run is not None:
            _show_run(run, fitted, output, picture)
        elif fitted is not None:
            raise ValueError("--fit needs a bench run to fit the tree to")
        else:
            assert alone is not None
            _show_alone(alone, picture)
    except (ValueError, OSError) as error:
        errors = Console(stderr=True, soft_wrap=True, highlight=False)
        errors.print(f"drafttree tree: {error}", style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def _show_alone(notation: str, picture: Path | None) -> None:
    if notation.startswith(BRANCHING):
        topology = StaticTree.from_notation(notation)
    else:
        topology = StaticTree.from_file(Path(notation))
    title = f"{topology.nodes} nodes, depth {topology.depth}"
    _print_tree(_outline(title, topology, lambda path: ""))
    _draw(topology, None, picture)


def _show_run(run: Path, fitted: int | None, output: Path | None, picture: Path | None) -> None:
    report = read_run(run)
    acceptance = report["acceptance"]
    if "sources" in acceptance:
        if fitted is not None or picture is not None:
            raise ValueError(
                f"{run} drafted no static tree, which --fit and --picture need: its trees differ "
                "from step to step"
            )
        Console(highlight=False).print(_sources(run, acceptance["sources"]))
        return
    try:
        measured = MeasuredTree.from_counts(acceptance, report["counters"].get("steps", 0))
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from error
    before = tokens_a_step(measured.tree, measured.shares)
    if fitted is None or output is None:
        title = (
            f"{report['method']} in {report['engine']}: {measured.tree.nodes} nodes, "
            f"{measured.steps} decode steps of {before:.2f} tokens"
        )
        _print_tree(_outline(title, measured.tree, lambda path: _measured(measured, path)))
        _draw(measured.tree, measured.shares, picture)
        return
    topology, shares = fit(measured, fitted)
    title = f"fitted: {topology.nodes} nodes, depth {topology.depth}"
    _print_tree(_outline(title, topology, lambda path: _share(shares, path)))
    after = tokens_a_step(topology, shares)
    _say(
        f"expected tokens a step: {before:.2f} before, with {measured.tree.nodes} nodes; "
        f"{after:.2f} after, with {topology.nodes}"
    )
    text = json.dumps({"paths": [list(path) for path in topology.paths]})
    output.write_text(text + "\n", encoding="utf-8")
    _say(f"written to {output}")
    _draw(topology, shares, picture)


def _outline(title: str, topology: StaticTree, describe: Callable[[RankPath], str]) -> Tree:
    branches: dict[RankPath, Tree] = {(): Tree(Text(title))}
    for path in topology.paths:
        label = f"rank {path[-1]}"
        if text := describe(path):
            label += f": {text}"
        branches[path] = branches[path[:-1]].add(Text(label))
    return branches[()]


def _measured(measured: MeasuredTree, path: RankPath) -> str:
    text = _share(measured.shares, path)
    if missing := measured.undrafted(path):
        text += f", missing {missing} times"
    return text


def _share(shares: Shares, path: RankPath) -> str:
    above = shares[path[:-1]]
    if not above:
        return "parent never accepted"
    return f"{shares[path] / above:.1%} of its parent's, {shares[path]:.1%} of steps"


def _sources(run: Path, rows: Any) -> Table:
    table = Table(caption="Drafts whose parent was accepted, by where they came from")
    table.add_column("source")
    for heading in ("tried", "accepted", "share"):
        table.add_column(heading, justify="right")
    try:
        for row in rows:
            counts = (f"{row['tried']:,d}", f"{row['hit']:,d}", f"{row['share']:.1%}")
            table.add_row(Text(row["source"]), *counts)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run}: its counts by source cannot be read: {error}") from error
    return table


def _draw(topology: StaticTree, shares: Shares | None, file: Path | None) -> None:
    if file is None:
        return
    from drafttree.picture import draw

    try:
        draw(topology, shares, file)
    except ImportError as error:
        raise ValueError("--picture needs matplotlib, which is missing: install it") from error
    _say(f"drawn into {file}")


def _print_tree(shown: Tree) -> None:
    # Where a deep tree is wider than the terminal, rich would leave out the deepest nodes.
    Console(highlight=False, width=4 * MAX_DEPTH + 80).print(shown)


def _say(text: str) -> None:
    Console(highlight=False).print(text, markup=False, soft_wrap=True)
