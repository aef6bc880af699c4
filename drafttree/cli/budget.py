"""`drafttree budget`: replay recorded steps through the node budget's planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from drafttree.bench.table import explained_table
from drafttree.budget.recording import RecordedStep, read_recording
from drafttree.budget.replay import Replay, changed_constants, replay


def budget(
    recording: Annotated[
        Path,
        typer.Argument(help="Steps that a run recorded with DRAFTTREE_RECORD_STEPS=FILE."),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE, a changed constant; may be repeated."),
    ] = None,
) -> None:
    """Replay recorded steps through the node budget, with its constants or with changed ones."""
    try:
        first, steps = read_recording(recording)
        if not steps:
            raise ValueError(f"{recording} contains no steps: record a run that decodes")
        constants = changed_constants(first.constants, _changes(set_ or []))
        result = replay(first, steps, constants)
    except ValueError as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(2) from error
    console = Console(highlight=False)
    console.print(explained_table({"explained": result.rows}))
    console.print(_allowances_table(result))
    console.print(_summary_table(steps, result))


def _changes(given: list[str]) -> dict[str, str]:
    changes = {}
    for change in given:
        name, equals, value = change.partition("=")
        if not (name and equals and value):
            raise ValueError(f"--set {change}: write NAME=VALUE, as in --set margin=1.1")
        changes[name] = value
    return changes


def _allowances_table(result: Replay) -> Table:
    table = Table(caption="Allowances in steps")
    table.add_column("allowance")
    for heading in ("at the end", "lowest"):
        table.add_column(heading, justify="right")
    for name, left in result.final.items():
        table.add_row(name, f"{left:.2f}", f"{result.lowest[name]:.2f}")
    return table


def _summary_table(steps: list[RecordedStep], result: Replay) -> Table:
    same = sum(step.choice == choice for step, choice in zip(steps, result.choices, strict=True))
    table = Table(caption=f"{same:,d} of {len(steps):,d} decisions as recorded")
    table.add_column("")
    table.add_column("recorded", justify="right")
    table.add_column("replayed", justify="right")
    both = (result.recorded, result.replayed)
    table.add_row("measured steps", *(f"{each.steps:,d}" for each in both))
    table.add_row("steps with drafts", *(f"{each.drafted_share:.1%}" for each in both))
    table.add_row("tokens/s", *(f"{each.tokens_per_second:.1f}" for each in both))
    return table
