"""Train Lyanna's drafter for SmolLM2-135M on text that the model has written.

    .venv-vllm/bin/python -m scripts.experiments.lyanna.make_smollm2_drafter \\
        WORK --prompts spec_bench_dev.jsonl

First, two processes have the model write conversations: some freely, others that begin like one of
the given prompts. The model also answers every second of these prompts, starting with the first;
the others are left for measurements. Then two processes train the drafter in WORK/drafter, first on
the free conversations and then on the others. An interrupted run is resumed by repeating the
command with the same WORK. Needs vLLM.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from drafttree.bench.models import ensure
from lyanna_plugin.training.dataset import read_conversations
from lyanna_plugin.training.regenerate import regenerate

_SCRIPT = Path(__file__).with_name("write_text.py")
_WRITERS = 2
_TRAINERS = 2
_CONTEXT = 2048


def write_text(model: Path, folder: Path, count: int, seeds: Path | None) -> None:
    """Run the writers, each with its own seed and file."""
    name, first = ("own", 0) if seeds is None else ("seeded", _WRITERS)
    writers = [
        subprocess.Popen(
            [
                *(sys.executable, str(_SCRIPT), str(model)),
                *("--output", str(folder / f"{name}-{writer}.jsonl")),
                *("--conversations", str(count // _WRITERS)),
                *("--seed", str((first + writer) * 1_000_000)),
                *(("--seeds", str(seeds)) if seeds else ()),
            ]
        )
        for writer in range(_WRITERS)
    ]
    if failed := [writer.args for writer in writers if writer.wait() != 0]:
        raise typer.Exit(f"failed: {failed}")


def answer_prompts(model: Path, prompts: Path, folders: list[Path], work: Path) -> None:
    """Answer every second prompt greedily, and put the answers into each folder."""
    asked = list(read_conversations(prompts))[::2]
    answered = regenerate(asked, model, 512, _CONTEXT, work, lambda done: None)
    for folder in folders:
        (folder / "prompts.jsonl").write_bytes(answered.read_bytes())


def train(model: Path, work: Path, text: Path, out: Path, epochs: int, *more: str) -> None:
    """Train on a folder of text, unless the drafter is already trained."""
    if (out / "held_out.json").exists():
        return
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_TRAINERS)),
        *("-m", "drafttree.cli", "train", "lyanna", "--target", str(model)),
        *("--data", str(text), "--out", str(out), "--cache", str(work / "features")),
        *("--epochs", str(epochs), "--bfloat16", *more),
    ]
    subprocess.run(command, check=True)


def main(
    work: Annotated[Path, typer.Argument(help="Folder for text, features and the drafter.")],
    prompts: Annotated[Path, typer.Option(help="In Spec-Bench's format.")],
    conversations: Annotated[int, typer.Option(help="Number of free conversations.")] = 9_000,
    seeded: Annotated[
        int, typer.Option(help="Number of conversations that begin like a prompt.")
    ] = 4_300,
    epochs: int = 2,
) -> None:
    """Train the drafter."""
    model = ensure("smollm2-135m")
    free, prompted = work / "text", work / "seeded"
    for folder in (free, prompted):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(model, free, conversations, None)
    write_text(model, prompted, seeded, prompts)
    answer_prompts(model, prompts, [free, prompted], work)
    first, last = work / "first", work / "drafter"
    train(model, work, free, first, epochs, "--learning-rate", "1e-3")
    more = "--learning-rate", "5e-4", "--start-from", str(first)
    train(model, work, prompted, last, epochs, *more)


if __name__ == "__main__":
    typer.run(main)
