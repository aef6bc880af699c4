"""`drafttree model`: make a small real model's folder and print its path.

Only the path goes to stdout, so that a shell can use it: `vllm serve $(drafttree model NAME)`.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from drafttree.models import ModelError, UnknownModelError, ensure
from drafttree.recipes import RECIPES


def model(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(RECIPES))}.")],
) -> None:
    """Make a model's folder if need be and print its path."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would cut through ours
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with console.status("Looking for the model") as status:

            def report(step: str) -> None:
                console.print(step, markup=False)
                status.update(step)

            folder = ensure(name, report)
    except ModelError as error:
        console.print(f"drafttree model: {error}", markup=False)
        raise typer.Exit(2 if isinstance(error, UnknownModelError) else 1) from None
    print(folder)
