"""`drafttree train`: one subcommand for each installed method with a trainer.

Trainers are functions in the entry-point group `drafttree.trainers`, which typer turns into
commands.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

train = typer.Typer(no_args_is_help=True, help="Train a method's drafter.")
for _entry in sorted(entry_points(group="drafttree.trainers"), key=lambda entry: entry.name):
    train.command(_entry.name)(_entry.load())


@train.callback()
def _group() -> None:
    """Train a method's drafter."""
