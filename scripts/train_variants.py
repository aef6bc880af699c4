"""Train Lyanna's drafter with and without its parts, and in EAGLE's way, all alike and briefly.

    .venv-vllm/bin/python scripts/train_variants.py TARGET --data own-0.jsonl --out VARIANTS

One folder a variant and seed. What is there already is left; what was interrupted goes on.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

VARIANTS = {
    "lyanna": [],
    "no-token-info": ["--no-token-info"],
    "no-first-token": ["--no-first-token"],
    "dense-token-info": ["--hot-tokens", "49152"],
    "eagle": ["--eagle"],
}


def main(
    target: Path,
    data: Annotated[Path, typer.Option(help="JSON lines.")],
    out: Annotated[Path, typer.Option(help="For the drafters.")],
    cache: Annotated[Path, typer.Option(help="For the target's hidden states.")],
    conversations: Annotated[int, typer.Option(help="The first so many.")] = 1024,
    epochs: int = 1,
    seeds: int = 3,
) -> None:
    """Train all variants."""
    out.mkdir(parents=True, exist_ok=True)
    text = out / "text.jsonl"
    with data.open(encoding="utf-8") as lines:
        text.write_text("".join(islice(lines, conversations)), encoding="utf-8")
    train = [sys.executable, "-m", "drafttree.cli", "train", "lyanna"]
    for seed in range(seeds):
        for name, flags in VARIANTS.items():
            folder = out / f"{name}-{seed}"
            if (folder / "config.json").exists():
                continue
            arguments = [
                *("--target", str(target), "--data", str(text), "--out", str(folder)),
                *("--cache", str(cache), "--epochs", str(epochs), "--seed", str(seed)),
                *("--learning-rate", "1e-3", "--bfloat16", *flags),
            ]
            subprocess.run([*train, *arguments], check=True)


if __name__ == "__main__":
    typer.run(main)
