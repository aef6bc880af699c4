"""`drafttree train lyanna`."""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from drafttree.deprecation import Deprecation
from drafttree.tree import MAX_DEPTH

NEEDED = ("accelerate", "matplotlib", "safetensors", "transformers")

# torchrun refuses it, as an abbreviation of both its `--start-method` and its `--start_method`.
FORMER_START = Deprecation(
    name="--start",
    of="`drafttree train lyanna`",
    instead="--start-from",
    since="0.2.0",
    gone_in="0.3.0",
)

logger = logging.getLogger(__name__)


def train(
    target: Annotated[Path, typer.Option(help="The target model's folder.")],
    data: Annotated[
        Path, typer.Option(help="Conversations in ShareGPT's format: a file, or a folder of them.")
    ],
    out: Annotated[
        Path, typer.Option(help="The drafter's folder. An interrupted run in it is resumed.")
    ],
    start_from: Annotated[
        Path | None, typer.Option(help="Folder of a drafter whose weights training starts from.")
    ] = None,
    former_start: Annotated[Path | None, typer.Option("--start", hidden=True)] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="First have the target write all answers.")
    ] = False,
    max_answer_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of a regenerated answer.")
    ] = 512,
    max_length: Annotated[
        int, typer.Option(min=16, help="Number of tokens at which conversations are truncated.")
    ] = 1024,
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the data.")] = 20,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 3e-5,
    positions: Annotated[
        int, typer.Option(min=1, help="Maximum number of positions of a batch, including padding.")
    ] = 1024,
    steps: Annotated[
        int, typer.Option(min=1, max=MAX_DEPTH, help="Number of drafting steps to unroll.")
    ] = 3,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the token info.")] = 128,
    hot_tokens: Annotated[
        int, typer.Option(min=1, help="Number of tokens that have token info: the most frequent.")
    ] = 8192,
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Multiply the layer's matrices in bfloat16.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the training.")] = 0,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for the target's hidden states. Default: OUT-features."),
    ] = None,
) -> None:
    """Train Lyanna's drafter for a target.

    On several GPUs, run `torchrun --nproc-per-node GPUS -m drafttree.cli train lyanna ...`: each
    GPU then takes its own batches.
    """
    console = Console(stderr=True)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fix = "pip install '.[train]' in drafttree's folder"
        # Brackets would be markup.
        console.print(
            f"error: {', '.join(missing)} missing: {fix}",
            style="red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(2)

    if former_start is not None:
        FORMER_START.warn(logger)
        start_from = start_from or former_start

    from lyanna_plugin.training.plot import plot
    from lyanna_plugin.training.run import Job, run
    from lyanna_plugin.training.trainer import TrainingProgress, TrainingSettings, join_processes

    # `--out .` has no name of its own.
    folder = out.resolve()
    job = Job(
        target=target,
        data=data,
        out=out,
        cache=cache or folder.with_name(f"{folder.name}-features"),
        start=start_from,
        settings=TrainingSettings(
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
        },
        max_length=max_length,
        answer_tokens=max_answer_tokens if regenerate else None,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    first = join_processes().is_main_process
    if not first:  # the first one reports for all
        logging.getLogger("lyanna_plugin").setLevel(logging.ERROR)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not first) as progress:
        task = progress.add_task("", total=None)

        def status(text: str, done: int = 0, total: int | None = None) -> None:
            nonlocal task
            if total is None:
                # A new stage; `update` would keep the numbers of the one before.
                progress.remove_task(task)
                task = progress.add_task("", total=None)
            progress.update(task, description=text, completed=done, total=total)

        def report(now: TrainingProgress) -> None:
            accuracy = " ".join(f"{value:.0%}" for value in now.accuracy)
            text = f"loss {now.loss:.2f}, accuracy at steps 1 to {steps}: {accuracy}"
            status(text, now.step, now.steps)

        try:
            acceptance = run(job, status, report)
        except (ValueError, OSError) as error:
            console.print(
                f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
        except KeyboardInterrupt:
            console.print("interrupted: repeat the command to resume from the last checkpoint")
            raise typer.Exit(130) from None
    if not first:
        return
    console.print(json.dumps(asdict(acceptance)), highlight=False, soft_wrap=True)
    plot(out / "metrics.jsonl", out / "training.png")
