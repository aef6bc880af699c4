"""Measure the figures of record, and write them as tables.

    python -m scripts.benchmarks.figures_of_record results/record \
        --limit 40 --max-new-tokens 64 --repeat 1
    python -m scripts.benchmarks.figures_of_record results/record --only-table

Plain decoding, vLLM's n-gram speculation, its suffix decoding and Token Recycling answer the same
prompts, by kind of task, in a first and a second wave, with 1, 8 and 32 requests at a time, in both
engines. Each run is one call of `drafttree bench`, whose two sides take turns, and writes one file
into the folder, whose runs all have the same settings. Runs that are there already are kept, so an
interrupted call can be repeated. A run that fails, or for which something is not installed, is
named with its reason and left out; the exit status is then 1.

The engines are those of `.venv-vllm` and `.venv-sglang` (`make environments`). Without `--model`
the target is SmolLM2-135M in its pinned version. The tables go to standard output, and everything
else to standard error.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from scripts.benchmarks.record_plan import (
    CONCURRENCIES,
    ENGINES,
    METHODS,
    Cell,
    Settings,
    cells,
    finished,
    reports,
    take_settings,
)
from scripts.benchmarks.record_table import tables

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
STDERR = 2
"""The file descriptor of standard error."""


def python_of(engine: str, environments: Path) -> Path:
    """The Python of an engine's environment."""
    return environments / f".venv-{engine}" / "bin" / "python"


def missing(cell: Cell, environments: Path) -> str | None:
    """Why a cell cannot be run here; None if nothing is known to keep it from that."""
    python = python_of(cell.engine, environments)
    if not python.exists():
        return f"{python} does not exist: make environment ENGINE={cell.engine}"
    if cell.method == "suffix":
        probe = "import sys; from importlib.util import find_spec as f; "
        probe += "sys.exit(f('arctic_inference') is None)"
        if subprocess.run([python, "-c", probe]).returncode:
            return "arctic-inference is not installed there: docs/command.md says how to build it"
    return None


def pinned_model(environments: Path, engines: list[str]) -> str:
    """The folder of the default target.

    Raises:
        ValueError: No engine is installed, or the model cannot be had.
    """
    pythons = [python_of(engine, environments) for engine in engines]
    python = next((each for each in pythons if each.exists()), None)
    if python is None:
        raise ValueError(f"{environments} has no environment of {' or '.join(engines)}")
    command = [python, "-m", "drafttree.cli", "model", MODEL, "--pinned"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise ValueError(f"{MODEL} cannot be made: give another model with --model")
    return made.stdout.strip()


def measure(cell: Cell, settings: Settings, folder: Path, environments: Path) -> str | None:
    """Run a cell, unless its report is there; return why there is none."""
    if finished(folder, cell) is not None:
        typer.echo(f"{cell.name}: already measured", err=True)
        return None
    if reason := missing(cell, environments):
        return reason
    typer.echo(f"{cell.name}:", err=True)
    # Renamed when it is whole, so that an interrupted run is not taken for a finished one.
    part = folder / f"{cell.file}.part"
    python = python_of(cell.engine, environments)
    command = [python, "-m", "drafttree.cli", "bench", *settings.arguments(cell, part)]
    status = subprocess.run(command, cwd=ROOT, stdout=STDERR).returncode
    if status:
        part.unlink(missing_ok=True)
        return f"drafttree bench ended with {status}; its message is above"
    part.rename(folder / cell.file)
    return None


def main(
    folder: Annotated[Path, typer.Argument(help="The folder of the reports.")],
    only_table: Annotated[
        bool, typer.Option("--only-table", help="Measure nothing; write the tables.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The target's folder.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts; if not given, the package's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    dtype: Annotated[str, typer.Option(help="The engines' data type.")] = "bfloat16",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer, at most.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported.")] = 3,
    engine: Annotated[list[str] | None, typer.Option(help="Default: both.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=f"Default: {', '.join(METHODS)}.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Default: 1, 8 and 32.")
    ] = None,
    environments: Annotated[Path, typer.Option(help="The folder of the environments.")] = ROOT,
) -> None:
    """Measure what is missing, and write the tables."""
    folder = folder.resolve()
    engines = engine or list(ENGINES)
    plan = list(cells(engines, concurrency or CONCURRENCIES, method or METHODS))
    left_out: dict[str, str] = {}
    if not only_table:
        try:
            if unknown := set(engines) - set(ENGINES):
                raise ValueError(f"--engine {unknown.pop()}: use {' or '.join(ENGINES)}")
            settings = Settings(
                model=str(Path(model or pinned_model(environments, engines)).resolve()),
                prompts=None if prompts is None else str(prompts.resolve()),
                limit=limit,
                dtype=dtype,
                max_new_tokens=max_new_tokens,
                repeat=repeat,
            )
            take_settings(folder, settings)
        except ValueError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        for cell in plan:
            if reason := measure(cell, settings, folder, environments):
                typer.echo(f"{cell.name}: left out: {reason}", err=True)
                left_out[cell.name] = reason
    typer.echo(tables(reports(folder, plan)), nl=False)
    raise typer.Exit(bool(left_out))


if __name__ == "__main__":
    typer.run(main)
