"""Train Lyanna's drafter and its ablation variants briefly, all with the same settings.

    .venv-vllm/bin/python -m scripts.experiments.lyanna.train_variants \\
        TARGET --data own-0.jsonl --out VARIANTS --cache FEATURES

There is one folder per variant and seed. Finished ones are skipped, and interrupted ones resumed.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from lyanna_plugin.training.run import Job, run
from lyanna_plugin.training.trainer import TrainingSettings
from scripts.experiments.lyanna.variants import VARIANTS


def train(
    target: Path, text: Path, out: Path, cache: Path, variant: str, epochs: int, seed: int
) -> None:
    """Train one variant."""
    model, shape = VARIANTS[variant]
    settings = TrainingSettings(epochs=epochs, learning_rate=1e-3, seed=seed, bfloat16=True)
    job = Job(
        target=target,
        data=text,
        out=out,
        cache=cache,
        settings=settings,
        shape=shape,
        model=model,
    )
    acceptance = run(job, lambda stage, done=0, total=None: None, lambda progress: None)
    typer.echo(f"{out.name}: {acceptance.mean_accepted_tokens:.3f} tokens per step")


def main(
    target: Path,
    data: Annotated[Path, typer.Option(help="Conversations, JSON lines.")],
    out: Annotated[Path, typer.Option(help="Folder of the drafters.")],
    cache: Annotated[Path, typer.Option(help="Folder for the target's hidden states.")],
    conversations: Annotated[int, typer.Option(help="Number of conversations to use.")] = 1024,
    epochs: int = 1,
    seeds: int = 3,
) -> None:
    """Train all variants."""
    out.mkdir(parents=True, exist_ok=True)
    text = out / "text.jsonl"
    with data.open(encoding="utf-8") as lines:
        text.write_text("".join(islice(lines, conversations)), encoding="utf-8")
    for seed in range(seeds):
        for variant in VARIANTS:
            folder = out / f"{variant}-{seed}"
            if not (folder / "held_out.json").exists():
                train(target, text, folder, cache, variant, epochs, seed)


if __name__ == "__main__":
    typer.run(main)
