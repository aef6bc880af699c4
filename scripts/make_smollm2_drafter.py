"""Make Lyanna's drafter for SmolLM2-135M: text of the model's own, and training on it.

    .venv-vllm/bin/python scripts/make_smollm2_drafter.py WORK --prompts spec_bench_dev.jsonl

The model writes conversations, in two processes side by side, some of them beginning as one of the
given prompts does, and answers these prompts: every other one, from the first on; the others are
left for measuring. Then the drafter is trained, in two processes too, first on what began freely,
then on what began as given, into WORK/drafter. A run that was stopped goes on where it was: give it
the same WORK. Needs vLLM.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from drafttree.models import ensure
from lyanna_plugin.training.dataset import read_conversations
from lyanna_plugin.training.regenerate import regenerate

_SCRIPT = Path(__file__).with_name("write_text.py")
_WRITERS = 2
_TRAINERS = 2
_CONTEXT = 2048


def write_text(model: Path, folder: Path, count: int, seeds: Path | None) -> None:
    """Two writers, each with a seed and a file of its own."""
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
    """Every other line of the file, answered greedily."""
    asked = list(read_conversations(prompts))[::2]
    answered = regenerate(asked, model, 512, _CONTEXT, work, lambda done: None)
    for folder in folders:
        (folder / "prompts.jsonl").write_bytes(answered.read_bytes())


def train(model: Path, work: Path, text: Path, out: Path, epochs: int, *more: str) -> None:
    """Train on a folder of text, unless that was done."""
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
    work: Annotated[Path, typer.Argument(help="For text, features and the drafter.")],
    prompts: Annotated[Path, typer.Option(help="In Spec-Bench's format.")],
    conversations: Annotated[int, typer.Option(help="Of the model's own invention.")] = 9_000,
    seeded: Annotated[int, typer.Option(help="That begin as some prompt does.")] = 4_300,
    epochs: int = 2,
) -> None:
    """Make the drafter."""
    model = ensure("smollm2-135m")
    free, begun = work / "text", work / "seeded"
    for folder in (free, begun):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(model, free, conversations, None)
    write_text(model, begun, seeded, prompts)
    answer_prompts(model, prompts, [free, begun], work)
    first, last = work / "first", work / "drafter"
    train(model, work, free, first, epochs, "--learning-rate", "1e-3")
    train(model, work, begun, last, epochs, "--learning-rate", "5e-4", "--start", str(first))


if __name__ == "__main__":
    typer.run(main)
