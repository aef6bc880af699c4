"""Measure a method against plain decoding while other processes disturb both, in known ways.

    python -m scripts.benchmarks.bench_under_noise MODEL --output results/noise.json

For each kind of noise of `noise.py`, and once without, this runs `drafttree bench`, whose two sides
take turns, and prints both sides' tokens per second. The noise begins before the engines start,
since a planner also measures the machine at start-up. The options after `--` are passed to
`drafttree bench`. The output is written after each kind and has the reports unchanged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.benchmarks.noise import NOISES
from scripts.experiments.common import heading, row


def bench(model: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The report of a run of `drafttree bench`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json"
        given = ["--model", str(model), "--output", str(output), *arguments]
        # Its own tables go to standard error, so that standard output has one table at the end.
        subprocess.run(
            [sys.executable, "-m", "drafttree.cli", "bench", *given], check=True, stdout=sys.stderr
        )
        report: dict[str, Any] = json.loads(output.read_text())
    return report


def table(runs: Sequence[dict[str, Any]]) -> None:
    """Print both sides under each kind of noise, with the speedup of each repetition."""
    heading("noise", "plain, tokens/s", "method, tokens/s", "speedup", "decode speedup")
    for run in runs:
        report = run["report"]
        each = ", ".join(f"{single['speedup']:.2f}" for single in report["repetitions"])
        row(
            f"{run['noise']}: {run['meaning']}",
            f"{report['baseline_tokens_per_second']:.1f}",
            f"{report['tokens_per_second']:.1f}",
            f"{report['speedup']:.2f} ({each})",
            f"{report['decode_speedup']:.2f}",
        )


def main(
    model: Path,
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    noise: Annotated[
        list[str] | None, typer.Option(help=f"May be repeated: {', '.join(NOISES)}. Default: all.")
    ] = None,
    method: Annotated[str, typer.Option(help="As in `drafttree bench`.")] = "token-recycling",
    limit: Annotated[int, typer.Option(help="Number of prompts.")] = 13,
    repeat: Annotated[int, typer.Option(help="Repetitions, in turns with plain decoding.")] = 3,
    further: Annotated[
        list[str] | None, typer.Argument(help="After `--`: options of `drafttree bench`.")
    ] = None,
) -> None:
    """Measure under each kind of noise."""
    names = noise or list(NOISES)
    if unknown := [name for name in names if name not in NOISES]:
        raise typer.BadParameter(f"--noise {unknown[0]!r} is not one of: {', '.join(NOISES)}")
    arguments = ["--method", method, "--limit", str(limit), "--repeat", str(repeat)]
    runs: list[dict[str, Any]] = []
    for name in names:
        typer.echo(f"{name}: {NOISES[name].meaning}", err=True)
        with NOISES[name].processes():
            report = bench(model, [*arguments, *(further or [])])
        runs.append({"noise": name, "meaning": NOISES[name].meaning, "report": report})
        output.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    table(runs)


if __name__ == "__main__":
    typer.run(main)
