"""Distil a small draft model from a target.

    python -m scripts.experiments.rsd.distil_draft TARGET --text text.jsonl --output DRAFT

The student starts from the target's first layers and its embeddings. It is trained to match the
target's next-token distribution (Kullback-Leibler divergence) on conversations that the target
wrote itself (`write_text.py`). Needs transformers.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

LENGTH = 256
"""Number of tokens of a training sequence."""


def sequences(text: Path, tokenizer: Any) -> Tensor:
    """All conversations concatenated and split into sequences, `int64 [N, LENGTH]`."""
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        roles = {"human": "user", "gpt": "assistant"}
        chat = [
            {"role": roles[said["from"]], "content": said["value"]}
            for said in json.loads(line)["conversations"]
        ]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        ids += tokenizer.encode(rendered, add_special_tokens=False)
    count = len(ids) // LENGTH
    return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)


def batches(data: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of `size` sequences, shuffled in each epoch."""
    rng = random.Random(seed)
    while True:
        order = list(range(len(data)))
        rng.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield data[order[start : start + size]]


def main(
    target: Path,
    text: Annotated[Path, typer.Option(help="Conversations in ShareGPT's format, JSON lines.")],
    output: Annotated[Path, typer.Option(help="Folder of the draft model.")],
    layers: Annotated[int, typer.Option(help="Number of layers of the draft model.")] = 2,
    steps: Annotated[int, typer.Option(help="Number of training steps.")] = 600,
    batch: Annotated[int, typer.Option(help="Sequences of 256 tokens per step.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the order of sequences.")] = 0,
) -> None:
    """Distil a draft model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    # The checkpoint's other layers are ignored.
    student = AutoModelForCausalLM.from_pretrained(target, config=config, dtype=torch.float32)
    # The text has too few occurrences of rare tokens to train their embeddings.
    student.get_input_embeddings().requires_grad_(False)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.05
    )
    data = sequences(text, tokenizer)
    if len(data) < batch:
        raise typer.BadParameter(f"--text {text}: {len(data)} sequences, a batch needs {batch}")
    training = batches(data, batch, seed)
    columns = ("{task.completed} of {task.total}", "loss {task.fields[loss]:.3f}")
    with Progress(*map(TextColumn, columns), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"))
        for _ in range(steps):
            tokens = next(training)
            with torch.no_grad():
                target_log_probs = teacher(tokens).logits.float().log_softmax(-1)
            loss = (
                F.kl_div(
                    student(tokens).logits.log_softmax(-1),
                    target_log_probs,
                    log_target=True,
                    reduction="sum",
                )
                / tokens.numel()
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1, loss=loss.item())
    student.to(torch.bfloat16).save_pretrained(output)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (target / file).exists():
            shutil.copy(target / file, output / file)
    print(f"written to {output}; the last step's loss was {loss.item():.3f}")


if __name__ == "__main__":
    typer.run(main)
