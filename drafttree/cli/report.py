"""`drafttree report`: all bench runs in a folder as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from drafttree.bench.run_files import find_runs
from drafttree.cli.output_file import check_output, write_output
from drafttree.cli.report_page import page


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with reports of drafttree bench.")
    ],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")],
) -> None:
    """Show the bench runs in a folder on one HTML page, with plots."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        check_output("--output", output, {})
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        runs, skipped = find_runs(folder)
        for file, reason in skipped.items():
            console.print(f"skipped {file}: {reason}", markup=False)
        if not runs:
            raise ValueError(f"{folder} has no runs: write some with drafttree bench --output")
        files = {run.file for run in runs} | skipped.keys()
        read = {f"the file {file} of DIR": folder / file for file in files}
        check_output("--output", output, read)
        write_output(output, page(folder, runs, skipped))
    except ImportError as error:
        console.print(
            "drafttree report: plots need matplotlib: pip install matplotlib", style="red"
        )
        raise typer.Exit(2) from error
    except (ValueError, OSError) as error:
        console.print(f"drafttree report: {error}", style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
    console.print(f"{len(runs)} runs, written to {output}", markup=False)
