"""The training loop, in one process or in one per GPU.

Checkpoints of the training state are written at regular intervals. A run that is started again in
the same folder resumes from the last checkpoint, with the same batches as if it had not been
interrupted.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from lyanna_plugin.training.batches import collate, order
from lyanna_plugin.training.features import Corpus
from lyanna_plugin.training.loss import DrafterLoss

_STATE = "training-state"
_PARTIAL, _REMOVED = f"{_STATE}.partial", f"{_STATE}.removed"
_UNREADABLE = RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError
"""What PyTorch, safetensors and pickle raise of files that were cut or overwritten."""


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters; the learning rate and the number of epochs default to the paper's.

    Attributes:
        epochs: Number of passes over the text.
        learning_rate: Peak learning rate.
        warm_up: Fraction of the steps over which the learning rate rises; then it falls to 0.
        positions: Maximum number of positions of a batch, including padding.
        clip: Maximum norm of the gradient.
        seed: Seed of the order of batches and of sampled tokens.
        save_every: Number of steps between two checkpoints of the training state.
        bfloat16: Whether the layer's matrices are multiplied in bfloat16.
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
class TrainingProgress:
    """The metrics of one training step.

    Attributes:
        step: Number of the step, counted from 1.
        steps: Number of steps of the whole training.
        loss: The loss.
        entropy: Cross-entropy of each unrolled step, over the part of the vocabulary in the loss.
        accuracy: Accuracy of each unrolled step, over the same part.
    """

    step: int
    steps: int
    loss: float
    entropy: tuple[float, ...]
    accuracy: tuple[float, ...]


def join_processes() -> Any:
    """Join the processes that torchrun has started, if any; may be called more than once."""
    from accelerate import PartialState

    # Only the first process regenerates answers, which may take days; the others wait for it.
    alone = "WORLD_SIZE" not in os.environ
    timeout = {} if alone else {"timeout": timedelta(days=7)}
    return PartialState(cpu=not torch.cuda.is_available(), **timeout)


def accelerator_for(settings: TrainingSettings) -> Any:
    """An `Accelerator` for the devices and processes of this run."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    join_processes()
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if settings.bfloat16 else "no",
        # The buffers are the target's own weights, equal in all processes.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )


def train(
    model: DrafterLoss,
    corpus: Corpus,
    settings: TrainingSettings,
    out: Path,
    report: Callable[[TrainingProgress], None],
    accelerator: Any = None,
) -> None:
    """Train `model.drafter`.

    With several processes each takes its own batch in every step, so there are fewer steps.

    Args:
        model: The draft model with its loss.
        corpus: The text.
        settings: Hyperparameters.
        out: Folder of checkpoints and of `metrics.jsonl`, which has one line per step.
        report: Called after each step.
        accelerator: The result of `accelerator_for`; None to create one.

    Raises:
        ValueError: There are more processes than batches, or the loss is no longer finite.
        OSError: A checkpoint or the metrics cannot be written.
    """
    from accelerate.utils import set_seed

    accelerator = accelerator or accelerator_for(settings)
    set_seed(settings.seed)
    epochs = [
        order(corpus, settings.positions, settings.seed, epoch) for epoch in range(settings.epochs)
    ]
    batches = [batch for epoch in epochs for batch in epoch]
    processes, process = accelerator.num_processes, accelerator.process_index
    steps = len(batches) // processes
    if steps == 0:
        raise ValueError(
            f"{len(batches)} batches are too few for {processes} processes: start fewer processes, "
            "or give more text"
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
        number = step * processes + process
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
        if not math.isfinite(first):
            raise ValueError(
                f"the loss of step {step + 1} is {first}: delete {out}, and train with a lower "
                f"--learning-rate than {settings.learning_rate:g}"
            )
        if accelerator.is_main_process:
            half = len(rest) // 2
            progress = TrainingProgress(
                step + 1, steps, first, tuple(rest[:half]), tuple(rest[half:])
            )
            _append(out, progress)
            report(progress)
        if (step + 1) % settings.save_every == 0 or step + 1 == steps:
            _save_state(accelerator, out, step + 1)


def finish(out: Path, figures: dict[str, Any]) -> None:
    """Write `held_out.json`, then delete the checkpoints of the training state."""
    (out / "held_out.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for state in _states(out):
        _remove(state)


def _states(out: Path) -> list[Path]:
    """The complete checkpoints, the latest last."""
    return sorted(out.glob(f"{_STATE}-*[0-9]"), key=lambda folder: int(folder.name.split("-")[-1]))


def has_state(out: Path) -> bool:
    """Whether the folder contains an interrupted run that can be resumed."""
    return bool(_states(out))


def _remove(state: Path) -> None:
    """Delete a checkpoint, under another name: half of one must not be taken for a complete one."""
    removed = state.with_name(_REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    state.replace(removed)
    shutil.rmtree(removed)


def _rate(progress: float, warm_up: float) -> float:
    """The learning rate's factor at a fraction of all steps: linear warm-up, then linear decay."""
    return progress / warm_up if progress < warm_up else (1 - progress) / (1 - warm_up)


def _save_state(accelerator: Any, out: Path, step: int) -> None:
    old = _states(out)
    partial = out / _PARTIAL
    try:
        accelerator.save_state(str(partial))
    # What PyTorch and safetensors raise if, for example, the disk is full.
    except (RuntimeError, SafetensorError) as error:
        raise OSError(
            f"the checkpoint {partial} cannot be written ({error}): free space, and repeat the "
            "command"
        ) from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.replace(out / f"{_STATE}-{step}")
        for state in old:
            _remove(state)
    accelerator.wait_for_everyone()


def _resume(accelerator: Any, out: Path) -> int:
    """Load the last checkpoint; returns the number of steps that are done.

    Raises:
        ValueError: It cannot be loaded.
    """
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        for name in (_PARTIAL, _REMOVED):
            shutil.rmtree(out / name, ignore_errors=True)
    accelerator.wait_for_everyone()
    if not has_state(out):
        return 0
    last = _states(out)[-1]
    try:
        accelerator.load_state(str(last))
    except _UNREADABLE as error:
        raise ValueError(
            f"the checkpoint {last} cannot be read ({error}): delete it if its files are damaged, "
            "and repeat the command to train from the start"
        ) from error
    return int(last.name.split("-")[-1])


def _keep_metrics(out: Path, done: int) -> None:
    """Drop the metrics of steps after the last checkpoint, which will be repeated."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines()[:done] if file.exists() and done else []
    file.write_text("".join(f"{line}\n" for line in lines))


def _append(out: Path, progress: TrainingProgress) -> None:
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(progress.__dict__) + "\n")
