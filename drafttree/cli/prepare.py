"""`drafttree prepare`: make now what a method would make at its first use of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from drafttree.method import find_method, installed_methods


def prepare(
    method: Annotated[str, typer.Option(help="The draft method, such as token-recycling.")],
    model: Annotated[Path, typer.Option(help="The folder of the model to be served.")],
) -> None:
    """Make now what a method would make at its first use of a model."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        found = find_method(method)
        if found.prepare is None:
            others = [name for name, other in installed_methods().items() if other.prepare]
            raise ValueError(
                f"{found.title} has nothing to prepare: it can be used at once. Methods that have: "
                f"{', '.join(sorted(others)) or 'none'}"
            )
        if not model.is_dir():
            raise ValueError(f"{model} is no folder: name the folder of a model's weights")
        found.prepare(model, found.parse({}))
    except (ValueError, OSError) as error:
        console.print(f"drafttree prepare: {error}", style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from where it was")
        raise typer.Exit(130) from None
