"""`drafttree train lyanna`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

NEEDED = ("accelerate", "matplotlib", "safetensors", "transformers")


def train(
    target: Annotated[Path, typer.Option(help="The target model's folder.")],
    data: Annotated[
        Path, typer.Option(help="Conversations in ShareGPT's format: a file, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option(help="The drafter's folder; an interrupted run goes on.")],
    start: Annotated[
        Path | None, typer.Option(help="A drafter's folder, to go on from its weights.")
    ] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Have the target write all answers first.")
    ] = False,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="Of regenerated answers.")] = 512,
    max_length: Annotated[int, typer.Option(min=16, help="Tokens of a conversation.")] = 1024,
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 3e-5,
    positions: Annotated[int, typer.Option(min=1, help="Of a batch.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Drafting steps to unroll.")] = 3,
    rank: Annotated[int, typer.Option(min=1, help="Of the token info.")] = 128,
    hot_tokens: Annotated[
        int, typer.Option(min=1, help="The most frequent tokens, which have token info.")
    ] = 8192,
    token_info: Annotated[bool, typer.Option(help="Add token info to the logits.")] = True,
    first_token: Annotated[bool, typer.Option(help="Fuse the root's embedding.")] = True,
    eagle: Annotated[
        bool, typer.Option("--eagle", help="For comparison: feed every token, no token info.")
    ] = False,
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Multiply the layer's matrices in bfloat16.")
    ] = False,
    seed: int = 0,
    cache: Annotated[
        Path | None, typer.Option(help="For the target's hidden states; beside OUT if not given.")
    ] = None,
) -> None:
    """Train Lyanna's drafter for a target.

    On several GPUs, start it as `torchrun --nproc-per-node GPUS -m drafttree.cli train lyanna ...`:
    each takes batches of its own.
    """
    console = Console(stderr=True)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        console.print(f"error: {', '.join(missing)} missing: install drafttree[train]")
        raise typer.Exit(2)

    from lyanna_plugin.training.plot import plot
    from lyanna_plugin.training.run import Job, run
    from lyanna_plugin.training.trainer import Progress as Step
    from lyanna_plugin.training.trainer import Settings, join_processes

    job = Job(
        target=target,
        data=data,
        out=out,
        cache=cache or out.with_name(f"{out.name}-features"),
        start=start,
        settings=Settings(
            epochs=epochs,
            learning_rate=learning_rate,
            positions=positions,
            seed=seed,
            bfloat16=bfloat16,
        ),
        shape={
            "steps": steps,
            "token_info_rank": rank,
            "num_hot_tokens": hot_tokens,
            "token_info": token_info and not eagle,
            "first_token": first_token,
            "feeds_tokens": eagle,
            "between": not eagle,
        },
        max_length=max_length,
        answer_tokens=max_answer_tokens if regenerate else None,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    first = join_processes().is_main_process
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not first) as progress:
        task = progress.add_task("", total=None)

        def status(text: str, done: int = 0, total: int | None = None) -> None:
            progress.update(task, description=text, completed=done, total=total)

        def report(step: Step) -> None:
            accuracy = " ".join(f"{value:.0%}" for value in step.accuracy)
            text = f"loss {step.loss:.2f}, right at steps 1 to {steps}: {accuracy}"
            status(text, step.step, step.steps)

        try:
            acceptance = run(job, status, report)
        except ValueError as error:
            console.print(
                f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            console.print("interrupted: the same command goes on from the last state")
            raise typer.Exit(130) from None
    if not first:
        return
    console.print(json.dumps(asdict(acceptance)), highlight=False, soft_wrap=True)
    plot(out / "metrics.jsonl", out / "training.png")
