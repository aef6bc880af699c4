"""`drafttree bench`: measures a draft method against plain decoding in the real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from drafttree.bench.context import DEFAULT_CONTEXT
from drafttree.bench.engine_process import check_name
from drafttree.bench.errors import EngineError, InputError
from drafttree.bench.methods import check_engine, resolve_variants
from drafttree.bench.prompts import Prompt, default_prompts_path, load_prompts
from drafttree.bench.protocol import Generation
from drafttree.bench.run import BenchSettings, batches, run
from drafttree.bench.table import (
    category_table,
    choices_table,
    comparison_table,
    explained_table,
    figures_table,
    waves_table,
)
from drafttree.cli.output_file import check_output, write_output


class Dtype(StrEnum):
    """Data types a run can use."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Runner(StrEnum):
    """vLLM's model runners."""

    v1 = "v1"
    v2 = "v2"


class ProgressObserver:
    """Shows the progress of a run as a bar."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def status(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def answered(self, prompt: Prompt, plain: list[Generation], method: list[Generation]) -> None:
        """Show nothing for a single prompt."""


def progress_bar(console: Console) -> Progress:
    """A progress bar with counts and elapsed time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def cut_note(report: dict[str, Any], most_context: int) -> str:
    """What is said of the prompts that were cut; empty if none was.

    Args:
        report: The report of the run.
        most_context: The greatest context that was allowed.
    """
    if not report["cut_prompts"]:
        return ""
    fix = (
        "the model, or its draft model, has no longer context"
        if report["context"] < most_context
        else "give a larger --context"
    )
    asked = report["prompts"] // len(report["waves"])
    return (
        f"{report['cut_prompts']} of {asked} prompts were cut to their last "
        f"{report['context'] - report['max_new_tokens']} tokens: {fix}"
    )


def bench(
    method: Annotated[
        str, typer.Option(help="none, ngram, suffix, draft-model, or an installed tree method.")
    ],
    model: Annotated[Path, typer.Option(help="The model's folder.")],
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    engine: Annotated[str, typer.Option(help="The engine to run in: vllm or sglang.")] = "vllm",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts in Spec-Bench's or SPEED-Bench's format; if not given, the shipped ones."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer, at most.")] = 128,
    context: Annotated[
        int,
        typer.Option(
            min=64, help="Tokens of a prompt and its answer; at most the model's own context."
        ),
    ] = DEFAULT_CONTEXT,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    dtype: Annotated[Dtype, typer.Option(help="The engines' data type.")] = Dtype.float32,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported.")] = 1,
    waves: Annotated[
        int, typer.Option(min=1, help="How often all prompts are asked in a repetition.")
    ] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE, an option of the method; may be repeated."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE; repeat it for one run per value and a comparison."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show how tree sizes were chosen.")
    ] = False,
    eager: Annotated[
        bool, typer.Option("--eager/--compiled", help="Faster start, or faster run.")
    ] = False,
    runner: Annotated[
        Runner | None,
        typer.Option(help="vLLM's model runner; if not given, the one that it takes by itself."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engines' output.")] = False,
) -> None:
    """Measure a method, or several settings of it, against plain decoding."""
    errors = Console(stderr=True)
    reports: list[dict[str, Any]] = []
    try:
        check_name(engine)
        check_output("--output", output, {"--prompts": prompts})
        if runner is not None and engine != "vllm":
            raise InputError(f"--runner {runner.value} is vLLM's own: use --engine vllm")
        variants = resolve_variants(method, option or [], vary or [])
        check_engine(engine, variants[0], temperature)
        asked = load_prompts(prompts or default_prompts_path(), limit)
        settings = BenchSettings(
            engine=engine,
            method=variants[0],
            model=model,
            prompts=asked,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            dtype=dtype.value,
            repeat=repeat,
            waves=waves,
            eager=eager,
            verbose=verbose,
            runner=runner.value if runner else None,
            prime=True,
            most_context=context,
        )
        with progress_bar(errors) as progress:
            total = 2 * repeat * len(batches(settings)) * len(variants)
            observer = ProgressObserver(progress, total)
            for variant in variants:
                reports.append(run(replace(settings, method=variant), observer))
                # Written after each run, so that a later failure loses nothing.
                written: Any = {"runs": reports} if vary else reports[0]
                write_output(output, json.dumps(written, indent=2) + "\n")
    except InputError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    except (EngineError, OSError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    console = Console()
    if vary:
        console.print(comparison_table(reports))
    else:
        console.print(category_table(reports[0]))
        console.print(figures_table(reports[0]))
    if waves > 1:
        for report in reports:
            console.print(waves_table(report, explain))
    if explain:
        for report in reports:
            if report["explained"]:
                console.print(explained_table(report))
                if report["choices"]:
                    console.print(choices_table(report))
            else:
                console.print(f"{report['method']}: tree sizes are fixed")
    for note in dict.fromkeys(cut_note(report, context) for report in reports):
        if note:
            console.print(note, style="yellow", highlight=False, soft_wrap=True)
    console.print(f"written to {output}", markup=False, highlight=False, soft_wrap=True)
