"""`drafttree demo`: answers a few prompts twice, with plain decoding and with a draft method."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from drafttree.bench.chat import Chat
from drafttree.bench.engine_process import TITLES, check_name
from drafttree.bench.errors import EngineError, InputError
from drafttree.bench.methods import check_engine, resolve_method, shipped_model
from drafttree.bench.models import ModelError, ensure, fetch
from drafttree.bench.prompts import Prompt, default_prompts_path, load_prompts
from drafttree.bench.protocol import Generation
from drafttree.bench.run import BenchSettings, run
from drafttree.bench.table import figures_table

_METHOD = "token-recycling"
_MODEL = "smollm2-135m"
_CATEGORIES = ("writing", "math", "coding", "stem", "translation", "summarization")
_NEW_TOKENS = 64


class Narrator:
    """Prints progress, and each prompt's answer as soon as both sides have given it."""

    def __init__(self, console: Console, chat: Chat, engine: str, method: str, total: int) -> None:
        self._console = console
        self._engine = engine
        self._chat = chat
        self._method = method
        self._total = total
        self._shown = 0

    def status(self, text: str) -> None:
        if text == "starting the engines":
            text = (
                f"starting two {TITLES[self._engine]} engines side by side "
                "(about 20 seconds on two cores)"
            )
        self._console.print(f"[dim]{text} …[/dim]")

    def advance(self) -> None:
        """Show nothing: answers are shown when both sides have given them."""

    def answered(self, prompt: Prompt, plain: list[Generation], method: list[Generation]) -> None:
        self._shown += 1
        same = all(a.token_ids == b.token_ids for a, b in zip(plain, method, strict=True))
        question = " ".join(prompt.turns[0].split())
        question = question if len(question) <= 160 else question[:159] + "…"
        self._console.print(f"\n[bold]{self._shown}/{self._total}  {escape(question)}[/bold]")
        self._console.print(escape(self._text(plain)))
        if not same:
            self._console.print(f"[yellow]with {self._method}:[/yellow]")
            self._console.print(escape(self._text(method)))
        steps = [sum(answer.steps for answer in side) for side in (plain, method)]
        self._console.print(
            f"[cyan]same text: {'yes' if same else 'no'} · decode steps: plain {steps[0]}, "
            f"{self._method} {steps[1]}[/cyan]"
        )

    def _text(self, answers: list[Generation]) -> str:
        return "\n".join(self._chat.decode(answer.token_ids).strip() for answer in answers)


def demo_prompts() -> list[Prompt]:
    """The first turn of the first shipped prompt in each of six categories."""
    shipped = load_prompts(default_prompts_path())
    chosen = [next(p for p in shipped if p.category == category) for category in _CATEGORIES]
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in chosen]


def demo(
    engine: Annotated[str, typer.Option(help="The engine to run in: vllm or sglang.")] = "vllm",
    method: Annotated[
        str, typer.Option(help="The draft method; one that needs a model must come with it.")
    ] = _METHOD,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Draft tokens per tree; if not given, the method's default."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engines' output.")] = False,
) -> None:
    """See an engine answer a few prompts twice: the same text, fewer steps."""
    console, errors = Console(highlight=False), Console(stderr=True)
    try:
        check_name(engine)
        options: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
        if (drafter := shipped_model(method, _MODEL)) is not None:
            options["model"] = str(drafter)
        resolved = resolve_method(method, options)
        check_engine(engine, resolved)
        # Shipped drafters were trained on the pinned weights and refuse others.
        get = fetch if drafter is None else ensure
        model = get(_MODEL, lambda step: console.print(f"[dim]{escape(step)} …[/dim]"))
        prompts = demo_prompts()
        settings = BenchSettings(
            engine=engine,
            method=resolved,
            model=model,
            prompts=prompts,
            max_new_tokens=_NEW_TOKENS,
            eager=True,
            verbose=verbose,
        )
        console.print(
            f"{_MODEL}, float32, greedy: {len(prompts)} prompts, at most {_NEW_TOKENS} new tokens "
            f"each, with plain decoding and with {resolved.name}"
        )
        narrator = Narrator(console, Chat(model), engine, resolved.name, len(prompts))
        report = run(settings, narrator)
    except InputError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    except (EngineError, ModelError, OSError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    console.print()
    console.print(figures_table(report))
    console.print(_verdict(report))


def _verdict(report: dict[str, Any]) -> str:
    """One or two sentences that sum up the figures."""
    saved = 1 - report["steps"] / report["baseline_steps"] if report["baseline_steps"] else 0.0
    lines = [
        f"{report['identical']} of {report['prompts']} answers are the same token for token"
        + (f" ({report['ties']} differ from a tie of two tokens on)" if report["ties"] else "")
        + f"; {report['method']} took {saved:.0%} fewer decode steps."
    ]
    if report["device"] == "cpu":
        lines.append(
            "On a CPU fewer steps need not mean less time: each step verifies a whole tree of "
            "tokens, and a few cores have little spare compute for it. --nodes 7 gives trees that "
            "are cheaper to verify."
        )
    return "\n".join(lines)
