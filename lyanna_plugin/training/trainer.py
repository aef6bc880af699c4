"""The training loop, in one process or one a GPU; where it stopped it goes on.

A state is written every so many steps; a run that is started again in the same folder takes the
last one and goes on as if it had not been interrupted, batch for batch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lyanna_plugin.checkpoint import save
from lyanna_plugin.model import Drafter
from lyanna_plugin.training.batches import collate, order
from lyanna_plugin.training.features import Corpus
from lyanna_plugin.training.loss import DrafterLoss

_STATE = "training-state"


@dataclass(frozen=True)
class Settings:
    """How to train; the learning rate and the epochs default to the paper's.

    Attributes:
        positions: of a batch, padding included.
        warm_up: the part of the steps in which the learning rate rises; then it falls to 0.
        save_every: steps between two states.
        bfloat16: whether to multiply the layer's matrices in bfloat16.
    """

    epochs: int = 20
    learning_rate: float = 3e-5
    warm_up: float = 0.03
    positions: int = 1024
    clip: float = 1.0
    seed: int = 0
    save_every: int = 200
    bfloat16: bool = False


@dataclass(frozen=True)
class Progress:
    """One step's figures: the loss, and by unrolled step its cross-entropy and accuracy, both over
    the part of the vocabulary that the step looked at."""

    step: int
    steps: int
    loss: float
    entropy: tuple[float, ...]
    accuracy: tuple[float, ...]


def join_processes() -> Any:
    """Meet the other processes that torchrun has started, if it has; may be called again."""
    from accelerate import PartialState

    # The first writes the answers alone, if they are to be written, while the others wait.
    alone = "WORLD_SIZE" not in os.environ
    waiting = {} if alone else {"timeout": timedelta(days=7)}
    return PartialState(cpu=not torch.cuda.is_available(), **waiting)


def accelerator_for(settings: Settings) -> Any:
    """What knows of devices and processes."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    join_processes()
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if settings.bfloat16 else "no",
        # The buffers are the target's own weights, the same everywhere.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )


def train(
    model: DrafterLoss,
    corpus: Corpus,
    settings: Settings,
    out: Path,
    report: Callable[[Progress], None],
    accelerator: Any = None,
) -> None:
    """Train `model.drafter`; states and `metrics.jsonl` go to `out`.

    Of several processes each takes a batch of its own in every step, so there are fewer steps.

    Raises:
        ValueError: there are more processes than batches.
    """
    from accelerate.utils import set_seed

    accelerator = accelerator or accelerator_for(settings)
    set_seed(settings.seed)
    epochs = [
        order(corpus, settings.positions, settings.seed, epoch) for epoch in range(settings.epochs)
    ]
    batches = [batch for epoch in epochs for batch in epoch]
    together, own = accelerator.num_processes, accelerator.process_index
    steps = len(batches) // together
    if steps == 0:
        raise ValueError(
            f"{len(batches)} batches are too few for {together} processes: start fewer, or give "
            "more text"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate(step / steps, settings.warm_up)
    )
    module, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(schedule)
    done = _resume(accelerator, out)
    if accelerator.is_main_process:
        _keep_metrics(out, done)
    module.train()
    for step in range(done, steps):
        number = step * together + own
        batch = collate(corpus, batches[number]).to(accelerator.device)
        generator = torch.Generator().manual_seed(settings.seed + number)
        loss, by_step = module(batch, generator)
        optimizer.zero_grad(set_to_none=True)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        schedule.step()
        figures = torch.cat([loss.detach()[None], by_step.flatten()])
        first, *rest = accelerator.reduce(figures, "mean").tolist()
        if accelerator.is_main_process:
            half = len(rest) // 2
            progress = Progress(step + 1, steps, first, tuple(rest[:half]), tuple(rest[half:]))
            _append(out, progress)
            report(progress)
        if (step + 1) % settings.save_every == 0:
            _save_state(accelerator, out, step + 1)


def finish(drafter: Drafter, out: Path, figures: dict[str, Any]) -> None:
    """Write the drafter and `held_out.json`; only then the state is of no more use."""
    (out / "held_out.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    save(drafter, out)
    for state in _states(out):
        shutil.rmtree(state)


def _states(out: Path) -> list[Path]:
    """The complete states, the last one last."""
    return sorted(out.glob(f"{_STATE}-*[0-9]"), key=lambda folder: int(folder.name.split("-")[-1]))


def has_state(out: Path) -> bool:
    """Whether an interrupted run can go on there."""
    return bool(_states(out))


def _rate(part: float, warm_up: float) -> float:
    """The learning rate's factor after a part of all steps: up, then linearly to 0."""
    return part / warm_up if part < warm_up else (1 - part) / (1 - warm_up)


def _save_state(accelerator: Any, out: Path, step: int) -> None:
    before = _states(out)
    partial = out / f"{_STATE}.partial"
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.replace(out / f"{_STATE}-{step}")
        for state in before:
            shutil.rmtree(state)
    accelerator.wait_for_everyone()


def _resume(accelerator: Any, out: Path) -> int:
    """The steps that are done already."""
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(out / f"{_STATE}.partial", ignore_errors=True)
    accelerator.wait_for_everyone()
    if not has_state(out):
        return 0
    last = _states(out)[-1]
    accelerator.load_state(str(last))
    return int(last.name.split("-")[-1])


def _keep_metrics(out: Path, done: int) -> None:
    """Forget what was measured after the last state: it will be measured again."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines()[:done] if file.exists() and done else []
    file.write_text("".join(f"{line}\n" for line in lines))


def _append(out: Path, progress: Progress) -> None:
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(progress.__dict__) + "\n")
