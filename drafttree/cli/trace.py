"""`drafttree trace`: shows how one answer came about, step by step, in the real engine."""

from __future__ import annotations

from collections.abc import Container
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.tree import Tree

from drafttree.bench.engine_process import check_name
from drafttree.bench.errors import EngineError, InputError
from drafttree.bench.methods import parse_pairs, resolve_method
from drafttree.bench.prompts import Prompt, default_prompts_path, load_prompts
from drafttree.bench.run import BenchSettings
from drafttree.bench.trace import Trace, read_trace
from drafttree.bench.trace import trace as record
from drafttree.cli.bench import Dtype
from drafttree.cli.output_file import check_output, write_output
from drafttree.cli.trace_page import page
from drafttree.cli.trace_terminal import renderables
from drafttree.tree import MAX_DEPTH


def trace(
    context: typer.Context,
    recorded: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRACE.json]",
            help="A trace that --json has written, to be shown again without an engine.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="An installed draft method.")] = None,
    model: Annotated[Path | None, typer.Option(help="The model's folder.")] = None,
    engine: Annotated[str, typer.Option(help="The engine to run in: vllm or sglang.")] = "vllm",
    prompt: Annotated[str | None, typer.Option(help="The prompt, a single turn.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts in Spec-Bench's or SPEED-Bench's format; if not given, the shipped ones."
        ),
    ] = None,
    index: Annotated[
        int | None, typer.Option(min=0, help="Which of the prompts, counted from 0.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer, at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    dtype: Annotated[Dtype, typer.Option(help="The engine's data type.")] = Dtype.float32,
    waves: Annotated[
        int, typer.Option(min=1, help="How often the prompt is asked; the last time is traced.")
    ] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE, an option of the method; may be repeated."),
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager/--compiled", help="Faster start, or faster run.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engine's output.")] = False,
    steps: Annotated[int, typer.Option(min=0, help="Steps shown here, at most.")] = 8,
    html: Annotated[
        Path | None, typer.Option(help="HTML file to write: a page to step through the answer.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file to write the trace to.")] = None,
) -> None:
    """Show one answer step by step: draft trees, sources, accepted tokens and times."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        read = {"TRACE.json": recorded, "--prompts": prompts}
        if json is not None:
            check_output("--json", json, read)
        if html is not None:
            check_output("--html", html, {**read, "--json": json})
        if recorded is not None:
            if given := _given(context, but=("recorded", "steps", "html", "json")):
                raise InputError(f"{recorded} is a trace already: leave out {', '.join(given)}")
            traced = read_trace(recorded)
        else:
            if method is None or model is None:
                raise InputError("give --method and --model, or a trace that --json has written")
            settings = BenchSettings(
                engine=engine,
                method=resolve_method(method, parse_pairs(option or [])),
                model=model,
                prompts=[_prompt(prompt, prompts, index)],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                dtype=dtype.value,
                waves=waves,
                eager=eager,
                verbose=verbose,
                # The only one of vLLM's runners whose steps can be recorded.
                runner="v1" if engine == "vllm" else None,
            )
            _check(settings)
            with errors.status(f"answering in {engine}"):
                traced = record(settings)
        # Written first: what reads the terminal's output may end before all of it is shown.
        if json is not None:
            # Unlike pydantic's, this JSON has escapes for lone surrogates, as in names of files.
            write_output(json, dumps(traced.model_dump(), indent=1) + "\n")
        if html is not None:
            write_output(html, page(traced))
        _show(traced, steps)
    except InputError as error:
        errors.print(f"drafttree trace: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
    except (EngineError, OSError) as error:
        errors.print(f"drafttree trace: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    for file in (html, json):
        if file is not None:
            Console().print(f"written to {file}", markup=False, highlight=False, soft_wrap=True)


def _given(context: typer.Context, but: Container[str]) -> list[str]:
    """The options that the command line has, except some."""
    given: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name not in but and source is not None and source.name == "COMMANDLINE":
            given.append("/".join([*option.opts, *option.secondary_opts]))
    return given


def _prompt(text: str | None, prompts: Path | None, index: int | None) -> Prompt:
    if text is not None:
        if prompts is not None or index is not None:
            raise InputError("--prompt is the prompt itself: leave --prompts and --index out")
        return Prompt("prompt", "prompt", (text,))
    loaded = load_prompts(prompts or default_prompts_path())
    number = index or 0
    if number >= len(loaded):
        raise InputError(f"--index {number}: there are {len(loaded)} prompts, counted from 0")
    return loaded[number]


def _check(settings: BenchSettings) -> None:
    check_name(settings.engine)
    if not settings.method.drafts_trees:
        raise InputError(
            f"--method {settings.method.name} drafts no trees that could be shown: give an "
            "installed tree method"
        )
    settings.context()


def _show(traced: Trace, steps: int) -> None:
    # In a narrow terminal rich would leave out the deepest nodes.
    wide = Console(highlight=False, width=4 * MAX_DEPTH + 100)
    plain = Console(highlight=False, soft_wrap=True)
    for each in renderables(traced, steps):
        (wide if isinstance(each, Tree) else plain).print(each)
