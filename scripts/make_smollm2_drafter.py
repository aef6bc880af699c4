"""Make Lyanna's drafter for SmolLM2-135M: text of the model's own, and training on it.

    .venv-vllm/bin/python scripts/make_smollm2_drafter.py WORK --prompts spec_bench_dev.jsonl

The model writes conversations, in two processes side by side, and answers every other line of the
given prompts, from the first on; the other lines are left for measuring. Then the drafter is
trained, into WORK/drafter. A run that was stopped goes on where it was: give it the same WORK.
Needs vLLM.
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
_CONTEXT = 2048


def write_text(model: Path, folder: Path, conversations: int) -> None:
    """Two writers, each with a seed and a file of its own."""
    writers = [
        subprocess.Popen(
            [
                *(sys.executable, str(_SCRIPT), str(model)),
                *("--output", str(folder / f"own-{writer}.jsonl")),
                *("--conversations", str(conversations // _WRITERS)),
                *("--seed", str(writer * 1_000_000)),
            ]
        )
        for writer in range(_WRITERS)
    ]
    if failed := [writer.args for writer in writers if writer.wait() != 0]:
        raise typer.Exit(f"failed: {failed}")


def answer_prompts(model: Path, prompts: list[Path], folder: Path, work: Path) -> None:
    """Every other line of the files, answered greedily."""
    asked = [chat for file in prompts for chat in list(read_conversations(file))[::2]]
    if not asked:
        return
    answered = regenerate(asked, model, 512, _CONTEXT, work, lambda done: None)
    (folder / "prompts.jsonl").write_bytes(answered.read_bytes())


def main(
    work: Annotated[Path, typer.Argument(help="For text, features and the drafter.")],
    prompts: Annotated[list[Path] | None, typer.Option(help="Also to be answered.")] = None,
    conversations: Annotated[int, typer.Option(help="That the model writes.")] = 14_000,
    epochs: int = 2,
) -> None:
    """Make the drafter."""
    model = ensure("smollm2-135m")
    text = work / "text"
    text.mkdir(parents=True, exist_ok=True)
    write_text(model, text, conversations)
    answer_prompts(model, prompts or [], text, work)
    command = [
        *(sys.executable, "-m", "drafttree.cli", "train", "lyanna", "--target", str(model)),
        *("--data", str(text), "--out", str(work / "drafter")),
        *("--cache", str(work / "features"), "--epochs", str(epochs)),
        *("--learning-rate", "1e-3", "--bfloat16"),
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    typer.run(main)
