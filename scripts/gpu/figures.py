"""Measure several methods at several batch sizes against one plain engine, all held on one GPU.

    python scripts/gpu/figures.py MODEL OUT token-recycling token-recycling,nodes=15 ngram

A method is given as `NAME` or `NAME,KEY=VALUE,...`, with options as `drafttree bench` takes them.
For each method and batch size, the folder OUT receives a report as `drafttree bench` writes it, as
soon as it is measured. Engines start one after another, because a tree planner measures forwards at
start, and another engine that starts meanwhile would slow them down. An engine that does not start,
or a measurement that fails, is shown, and the others go on; the exit status is 1 then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from drafttree.bench.chat import Chat
from drafttree.bench.context import usable_context
from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.errors import InputError
from drafttree.bench.methods import BenchMethod, check_engine, parse_pairs, resolve_method
from drafttree.bench.prompts import Prompt, default_prompts_path, load_prompts
from drafttree.bench.protocol import EngineSpec, Generation
from drafttree.bench.run import BenchSettings, Pair
from drafttree.cli.bench import Dtype, Runner

GIB = 1 << 30


class Log:
    """Lines with the seconds since the start, and whether anything failed."""

    def __init__(self) -> None:
        self.failed = False
        self._console = Console(markup=False, highlight=False, soft_wrap=True)
        self._began = monotonic()

    def line(self, text: str) -> None:
        """Show a line."""
        self._console.print(f"{monotonic() - self._began:4.0f} s  {text}")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Show a failure of what is attempted, and go on."""
        try:
            yield
        except Exception as error:
            self.failed = True
            self.line(f"{what} failed: {type(error).__name__}: {error}")


class NullObserver:
    """Ignores the progress of a measurement."""

    def status(self, text: str) -> None: ...

    def advance(self) -> None: ...

    def answered(
        self, prompt: Prompt, plain: list[Generation], method: list[Generation]
    ) -> None: ...


def parse_method(text: str) -> BenchMethod:
    """The method given as `NAME` or `NAME,KEY=VALUE,...`."""
    name, *pairs = text.split(",")
    method = resolve_method(name, parse_pairs(pairs))
    check_engine("vllm", method)
    return method


def file_name(label: str, batch_size: int) -> str:
    """The name of a report's file."""
    return f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', label)}-batch-{batch_size}.json"


def summary(report: dict[str, Any]) -> str:
    """The most important figures of a report in one line."""

    def shown(name: str, digits: int) -> str:
        return "-" if report[name] is None else f"{report[name]:.{digits}f}"

    text = (
        f"{shown('mean_accepted_tokens', 2)} tokens a step, "
        f"{shown('speedup', 2)} times as fast, {shown('decode_speedup', 2)} in decoding, "
        f"{shown('tokens_per_second', 0)} tokens/s, "
        f"plain {shown('baseline_tokens_per_second', 0)}, "
        f"{report['identical']} of {report['prompts']} identical, {report['ties']} ties"
    )
    if drafted := report["counters"].get("drafted_steps"):
        text += f", {report['counters']['draft_tokens'] / drafted:.1f} draft tokens a drafted step"
    return text


def start(stack: ExitStack, label: str, spec: EngineSpec) -> EngineProcess:
    """Start an engine, and wait until it has started."""
    process = stack.enter_context(EngineProcess("vllm", label, spec))
    process.wait_until_ready()
    return process


def main(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    output: Annotated[Path, typer.Argument(help="Folder for the reports.")],
    methods: Annotated[list[str], typer.Argument(help="NAME or NAME,KEY=VALUE,...")],
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="May be repeated. Default: 1, 4, 16 and 40.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="As in `drafttree bench`; if not given, the shipped ones.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="The first N prompts, or as many as a batch if that is more."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer, at most.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="The engines' data type.")] = Dtype.bfloat16,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians are reported.")] = 1,
    runner: Annotated[
        Runner | None, typer.Option(help="vLLM's model runner; if not given, its own choice.")
    ] = None,
    kv_cache: Annotated[int, typer.Option(min=1, help="KV cache of each engine in GiB.")] = 6,
    eager: Annotated[
        bool, typer.Option("--eager/--compiled", help="Faster start, or faster run.")
    ] = False,
) -> None:
    """Measure methods at several batch sizes against one plain engine."""
    sizes = batch_size or [1, 4, 16, 40]
    try:
        parsed = {label: parse_method(label) for label in methods}
        asked = load_prompts(prompts or default_prompts_path())
        context = usable_context(model, max_new_tokens)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    if max(sizes) > len(asked):
        raise typer.BadParameter(f"--batch-size {max(sizes)}: there are {len(asked)} prompts")
    output.mkdir(parents=True, exist_ok=True)
    spec = EngineSpec(
        model=str(model),
        dtype=dtype.value,
        batch_size=max(sizes),
        max_model_len=context,
        eager=eager,
        runner=runner.value if runner else None,
        kv_cache_bytes=kv_cache * GIB,
    )
    chat, log = Chat(model), Log()
    engines: dict[str, EngineProcess] = {}
    with ExitStack() as stack:
        with log.attempt("the plain engine"):
            plain = start(stack, "plain", spec)
            log.line(f"plain: {plain.wait_until_ready()}")
        if log.failed:
            raise typer.Exit(1)
        for label, method in parsed.items():
            with log.attempt(label):
                config = replace(spec, speculative_config=method.speculative_config)
                process = start(stack, label, config)
                log.line(f"{label}: {process.wait_until_ready()}")
                if method.primes:
                    for _ in process.priming():
                        pass
                    log.line(f"{label}: primed")
                engines[label] = process
        for size in sizes:
            first = len(asked) if limit is None else max(limit, size)
            for label, process in engines.items():
                settings = BenchSettings(
                    engine="vllm",
                    method=parsed[label],
                    model=model,
                    prompts=asked[:first],
                    max_new_tokens=max_new_tokens,
                    batch_size=size,
                    dtype=dtype.value,
                    repeat=repeat,
                    eager=eager,
                    runner=spec.runner,
                    prime=True,
                )
                with log.attempt(f"batch {size}, {label}"):
                    pair = Pair(settings, NullObserver(), chat, context, plain, process)
                    report = pair.measure()
                    text = json.dumps(report, indent=2) + "\n"
                    (output / file_name(label, size)).write_text(text, encoding="utf-8")
                    log.line(f"batch {size}, {label}: {summary(report)}")
    if log.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
