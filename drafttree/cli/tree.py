"""`drafttree tree`: shows the acceptance of drafts in a bench run and fits a better tree."""

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

from drafttree.bench.table import sources_table
from drafttree.bench.tree_fit import MeasuredTree, Shares, fit, read_run, tokens_per_step
from drafttree.cli.output_file import check_output, write_output
from drafttree.tree import BRANCHING, MAX_DEPTH, RankPath, StaticTree


def tree(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN.json]", help="A report of drafttree bench.")
    ] = None,
    alone: Annotated[
        str | None,
        typer.Option("--tree", help="A tree to show without a run: a file, or branch:4-2-1."),
    ] = None,
    fitted: Annotated[
        int | None,
        typer.Option("--fit", help="Number of draft tokens of a static tree to fit to the run."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the fitted tree, which the option tree can load.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="PNG file for a picture of the static tree.")
    ] = None,
) -> None:
    """Show the acceptance of each node of a draft tree, or fit a better tree."""
    try:
        if (run is None) == (alone is None):
            raise ValueError("give either a bench run or --tree, not both")
        if (fitted is None) != (output is None):
            raise ValueError("--fit and --output need each other: give a size and a file to write")
        read = {"RUN.json": run, "--tree": Path(alone) if alone is not None else None}
        if output is not None:
            check_output("--output", output, read)
        if picture is not None:
            check_output("--picture", picture, {**read, "--output": output})
        if run is not None:
            _show_run(run, fitted, output, picture)
        elif fitted is not None:
            raise ValueError("--fit fits a tree to a bench run: give the run instead of --tree")
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
    title = f"{topology.num_draft_tokens} draft tokens, depth {topology.depth}"
    _print_tree(_outline(title, topology, lambda path: ""))
    _draw(topology, None, picture)


def _show_run(run: Path, fitted: int | None, output: Path | None, picture: Path | None) -> None:
    report = read_run(run)
    acceptance = report["acceptance"]
    if "sources" in acceptance:
        if fitted is not None or picture is not None:
            raise ValueError(
                f"the trees of {run} differ from step to step, but --fit and --picture need a "
                "static tree: bench the method with one"
            )
        Console(highlight=False).print(_sources(run, acceptance["sources"]))
        return
    try:
        measured = MeasuredTree.from_counts(acceptance, report["counters"].get("steps", 0))
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from error
    before = tokens_per_step(measured.tree, measured.shares)
    if fitted is None or output is None:
        title = (
            f"{report['method']} in {report['engine']}: "
            f"{measured.tree.num_draft_tokens} draft tokens, "
            f"{measured.steps} decode steps of {before:.2f} tokens"
        )
        _print_tree(_outline(title, measured.tree, lambda path: _measured(measured, path)))
        _draw(measured.tree, measured.shares, picture)
        return
    topology, shares = fit(measured, fitted)
    title = f"fitted: {topology.num_draft_tokens} draft tokens, depth {topology.depth}"
    _print_tree(_outline(title, topology, lambda path: _share(shares, path)))
    after = tokens_per_step(topology, shares)
    _print(
        f"expected tokens per step: {before:.2f} before, "
        f"with {measured.tree.num_draft_tokens} draft tokens; "
        f"{after:.2f} after, with {topology.num_draft_tokens}"
    )
    text = json.dumps({"paths": [list(path) for path in topology.paths]})
    write_output(output, text + "\n")
    _print(f"written to {output}")
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
        text += f", not drafted {missing} times"
    return text


def _share(shares: Shares, path: RankPath) -> str:
    above = shares[path[:-1]]
    if not above:
        return "parent never accepted"
    return f"accepted in {shares[path]:.1%} of steps, {shares[path] / above:.1%} of its parent's"


def _sources(run: Path, rows: Any) -> Table:
    try:
        return sources_table(rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run}: its counts by source cannot be read: {error}") from error


def _draw(topology: StaticTree, shares: Shares | None, file: Path | None) -> None:
    if file is None:
        return
    from drafttree.cli.tree_picture import drawn

    try:
        write_output(file, drawn(topology, shares, file.suffix.removeprefix(".") or "png"))
    except ImportError as error:
        raise ValueError("--picture needs matplotlib: pip install matplotlib") from error
    _print(f"drawn into {file}")


def _print_tree(shown: Tree) -> None:
    # In a narrow terminal rich would leave out the deepest nodes.
    Console(highlight=False, width=4 * MAX_DEPTH + 80).print(shown)


def _print(text: str) -> None:
    Console(highlight=False).print(text, markup=False, soft_wrap=True)
