"""`drafttree prepare`: does beforehand what a method's drafter would do while serving.

It computes what needs no request or, with a corpus, keeps texts for later engines.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tree_kernels.cache import cache_root, make_private

from drafttree.bench.engine_process import ENGINES, EngineProcess, check_name
from drafttree.bench.errors import EngineError, InputError
from drafttree.bench.methods import parse_pairs
from drafttree.bench.protocol import EngineSpec
from drafttree.method import Method, Remembered, find_method, installed_methods
from drafttree.model_files import local_folder

_CONTEXT = 256  # tokens; nothing but trees of depth 1 is computed


def prepare(
    method: Annotated[str, typer.Option(help="An installed draft method.")],
    model: Annotated[
        str, typer.Option(help="The model to be served: its folder, or its name on the Hub.")
    ],
    engine: Annotated[
        str | None, typer.Option(help="vllm or sglang; if not given, the one that is installed.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="The data type to compute with, as the engine names it.")
    ] = "auto",
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file that drafts may copy from, instead of computing anything; may be "
            "repeated."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE, an option of the method, for --corpus; may be repeated."),
    ] = None,
) -> None:
    """Compute now what a method would compute while it serves a model for the first time, or keep
    a corpus for it."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        folder = local_folder(model)
        if folder is None:
            raise InputError(
                f"--model {model} is neither a folder nor in the Hub's local cache: give a model "
                "whose files are on this machine"
            )
        if corpus:
            remembered = _remember(method, folder, corpus, option or [])
            for line in _kept(remembered, len(corpus)):
                console.print(line, markup=False)
            return
        if option:
            raise InputError(f"--option {option[0]} is for --corpus alone: leave it out")
        found = _method(method)
        make_private(cache_root())
        spec = EngineSpec(
            model=str(folder),
            dtype=dtype,
            max_model_len=_CONTEXT,
            eager=True,
            speculative_config={"method": found.name},
            tokenizer=False,
        )
        if engine is not None:
            check_name(engine)
        with (
            EngineProcess(engine or _installed_engine(), found.title, spec) as process,
            _progress_shown(console, f"Priming {found.title}") as show,
        ):
            process.wait_until_ready()
            most = 0
            for done, everything in process.priming():
                show(done, everything)
                most = max(most, everything)
            if not most:
                raise EngineError(f"{found.title} primes nothing for a model without draft trees")
            if done < most:
                raise EngineError(f"priming ended after {done} of {most} tokens")
    except ValueError as error:
        console.print(f"drafttree prepare: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    except (EngineError, OSError) as error:
        console.print(f"drafttree prepare: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("interrupted: run the same command again to continue")
        raise typer.Exit(130) from None
    console.print(f"{found.title} is primed for {model}", markup=False)


def _remember(
    name: str, folder: Path, corpus: Sequence[Path], options: Sequence[str]
) -> Remembered:
    found = find_method(name)
    if found.remember is None:
        raise InputError(f"{found.title} copies no texts: leave --corpus out")
    texts = []
    for file in corpus:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--corpus {file} cannot be read: {error}") from error
    return found.remember(folder, found.parse(parse_pairs(options)), texts)


def _kept(remembered: Remembered, files: int) -> Iterator[str]:
    """What is said of a corpus of so many files."""
    given, kept, dropped = remembered.given, remembered.kept, remembered.dropped
    source = "of 1 file" if files == 1 else f"of {files} files"
    if kept == given:
        yield f"{given} tokens {source} are kept"
    else:
        yield f"the last {kept} of {given} tokens {source} are kept"
    if dropped:
        yield f"the oldest {dropped} tokens of earlier texts were dropped"
    if dropped or kept < given:
        yield "the memory is full: set a larger memory=N, here and for the engine"


def _method(name: str) -> Method[Any]:
    found = find_method(name)
    if not found.primes:
        others = [other for other, method in installed_methods().items() if method.primes]
        raise InputError(
            f"{found.title} needs no preparation. Methods that do: "
            f"{', '.join(sorted(others)) or 'none'}"
        )
    return found


def _installed_engine() -> str:
    for engine in ENGINES:
        if importlib.util.find_spec(engine) is not None:
            return engine
    raise InputError(f"no engine is installed: install one of {', '.join(ENGINES)}")


class _Show(Protocol):
    def __call__(self, done: int, everything: int) -> None: ...


@contextmanager
def _progress_shown(console: Console, what: str) -> Iterator[_Show]:
    """Show progress: a bar on a terminal, elsewhere a line for every tenth."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        tenths_shown = -1

        def show(done: int, everything: int) -> None:
            nonlocal tenths_shown
            progress.update(task, completed=done, total=everything)
            tenths = done * 10 // max(everything, 1)
            if not console.is_terminal and tenths > tenths_shown:
                tenths_shown = tenths
                console.print(f"{what}: {done} of {everything} tokens")

        yield show
