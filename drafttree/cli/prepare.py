"""`drafttree prepare`: does a method's one-time work for a model before it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from drafttree.method import find_method, installed_methods


def prepare(
    method: Annotated[str, typer.Option(help="An installed draft method.")],
    model: Annotated[Path, typer.Option(help="The folder of the model to be served.")],
) -> None:
    """Do a method's one-time work for a model before it is served."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        found = find_method(method)
        if found.prepare is None:
            others = [name for name, other in installed_methods().items() if other.prepare]
            raise ValueError(
                f"{found.title} needs no preparation. Methods that do: "
                f"{', '.join(sorted(others)) or 'none'}"
            )
        if not model.is_dir():
            raise ValueError(
                f"--model {model} is not a folder: give the folder of a model's weights"
            )
        found.prepare(model, found.parse({}))
    except (ValueError, OSError) as error:
        console.print(f"drafttree prepare: {error}", style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    except KeyboardInterrupt:
        console.print("interrupted: run the same command again to continue")
        raise typer.Exit(130) from None
