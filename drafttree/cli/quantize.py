"""`drafttree quantize`: save a copy of a model with 8-bit weights, to draft with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="The model's folder, or its name on the Hub if its files are in the local cache.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Argument(help="A new folder for the copy.", show_default=False)],
) -> None:
    """Save a copy of a model with 8-bit weights, which is a faster draft model."""
    from drafttree.model_files import local_folder
    from drafttree.quantization import quantize as quantize_model  # it takes seconds to import

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with console.status("Reading the model") as status:
            quantize_model(local_folder(model) or Path(model), output, status.update)
    except (ValueError, OSError) as error:
        console.print(f"drafttree quantize: {error}", markup=False)
        raise typer.Exit(1) from None
    print(output)
