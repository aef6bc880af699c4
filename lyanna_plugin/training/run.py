"""A training run: from a target and conversations to a trained drafter."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from drafttree.model_files import first_rows_fingerprint
from lyanna_plugin.checkpoint import layer_config, load, save
from lyanna_plugin.model import LyannaConfig, LyannaModel
from lyanna_plugin.training.acceptance import Acceptance, measure
from lyanna_plugin.training.dataset import (
    Messages,
    Sample,
    encode,
    read_conversations,
    render_all,
    rewrites_answers,
    token_counts,
)
from lyanna_plugin.training.features import Corpus, Features
from lyanna_plugin.training.initial import initialise
from lyanna_plugin.training.loss import Columns, DrafterLoss, LossWeights
from lyanna_plugin.training.regenerate import prompts, regenerate, renderable
from lyanna_plugin.training.target import check_format, last_layer, load_target
from lyanna_plugin.training.trainer import (
    TrainingProgress,
    TrainingSettings,
    accelerator_for,
    finish,
    has_state,
    train,
)

_HELD_OUT = 0.02
_FREQUENT, _SAMPLED = 2048, 1024
"""Tokens of the vocabulary in the loss: the most frequent ones, and a random sample."""

_CONTEXT, _TEMPLATE = 8192, 64
"""Maximum length of regenerated conversations, and tokens of the chat template around a turn."""


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        target: Folder of the target.
        data: A file of conversations, or a folder of such files.
        out: Folder of the drafter.
        cache: Folder of the target's features.
        settings: Hyperparameters.
        weights: Weights of the parts of the loss.
        shape: Fields of `LyannaConfig` that differ from their defaults.
        model: Class of the draft model.
        start: Folder of a drafter whose weights the training starts from.
        max_length: Number of tokens at which conversations are truncated.
        answer_tokens: Maximum number of tokens of regenerated answers; None to use the answers in
            the data.
    """

    target: Path
    data: Path
    out: Path
    cache: Path
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    weights: LossWeights = field(default_factory=LossWeights)
    shape: dict[str, Any] = field(default_factory=dict)
    model: type[LyannaModel] = LyannaModel
    start: Path | None = None
    max_length: int = 1024
    answer_tokens: int | None = None


class Status(Protocol):
    """Shows the current stage of a run and its progress."""

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        """Called at the beginning of each stage, and as it advances."""


def run(job: Job, status: Status, report: Callable[[TrainingProgress], None]) -> Acceptance:
    """Train a drafter and write it; an interrupted run is resumed.

    Args:
        job: The run.
        status: Shows the current stage.
        report: Called after each training step.

    Returns:
        The acceptance on the held-out conversations.

    Raises:
        ValueError: The target or the data cannot be used; the message gives the reason.
        OSError: A file cannot be written.
    """
    from transformers import AutoTokenizer

    accelerator = accelerator_for(job.settings)
    torch.manual_seed(job.settings.seed)
    layer = layer_config(job.target)
    check_format(job.target, layer)
    if (job.out / "config.json").exists() and not has_state(job.out):
        raise ValueError(f"--out {job.out} already holds a drafter: choose another folder")
    digest = first_rows_fingerprint(job.target)
    config = LyannaConfig(target=job.target.name, fingerprint=digest, **job.shape)
    hot = min(config.num_hot_tokens, layer.vocab_size)
    config = config.model_copy(update={"num_hot_tokens": hot})
    drafter = None if job.start is None else _started_from(job, job.start, config)
    _make_folder(job.out)
    status("reading the conversations")
    tokenizer = AutoTokenizer.from_pretrained(job.target)
    # The first process regenerates the answers; the others read its file.
    with accelerator.main_process_first():
        conversations = _conversations(job, tokenizer, layer.max_position_embeddings, status)
        samples = _samples(job, tokenizer, conversations)
    device = accelerator.device
    target = load_target(job.target).to(device)
    features = Features(job.cache, samples, digest, target.dtype)
    features.compute(
        target,
        device,
        lambda done, total: status("the target's hidden states", done, total),
        (accelerator.process_index, accelerator.num_processes),
    )
    accelerator.wait_for_everyone()
    corpus = Corpus.whole(samples, features)
    held_out = _held_out(len(samples), job.settings.seed)
    validation = corpus.part(sorted(held_out))
    training = corpus.part(i for i in range(len(samples)) if i not in held_out)
    embeddings = target.get_input_embeddings().weight.detach().float()
    counts = token_counts(training.samples, layer.vocab_size)
    frequent = counts.argsort(descending=True)
    head = target.get_output_embeddings().weight.detach().float()
    if drafter is None:
        scale = float(embeddings.square().mean().rsqrt())
        config = config.model_copy(update={"embedding_scale": scale})
        drafter = job.model(layer, config, frequent[:hot].sort().values)
        status("fitting the initial weights")
        initialise(
            drafter,
            *(training, embeddings.cpu(), head.cpu()),
            last_layer(target),
            target.get_decoder().norm.weight.detach().float().cpu(),
        )
    columns = Columns(frequent[:_FREQUENT], layer.vocab_size, _SAMPLED)
    model = DrafterLoss(drafter, embeddings, head, columns, job.weights)
    del target
    status("training")
    settings = {
        **asdict(job.settings),
        "processes": accelerator.num_processes,
        "loss": asdict(job.weights),
        "drafter": drafter.config.model_dump(),
        "start": job.start and job.start.name,
        "conversations": len(training.samples),
        "answer_tokens": sum(int(each.answer.sum()) for each in training.samples),
    }
    _check_unchanged(job.out, settings)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _write_settings(job.out, settings)
    train(model, training, job.settings, job.out, report, accelerator)
    if accelerator.is_main_process:
        save(drafter, job.out)
    status("measuring")
    acceptance = measure(model, validation, device)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        finish(job.out, asdict(acceptance))
    return acceptance


def _make_folder(out: Path) -> None:
    """Make the drafter's folder.

    Raises:
        ValueError: It cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written ({error.strerror}): choose another folder"
        ) from error


def _started_from(job: Job, start: Path, config: LyannaConfig) -> LyannaModel:
    """The drafter that the training starts from.

    Raises:
        ValueError: It cannot be read, belongs to another target, or differs from `config`.
    """
    drafter = load(start, job.target, job.model)
    for name, expected in config.model_dump(exclude={"target", "embedding_scale"}).items():
        if (found := getattr(drafter.config, name)) != expected:
            raise ValueError(
                f"--start-from {start} has {name}={found}, not {expected}: repeat the options "
                "that it was trained with"
            )
    return drafter


def _samples(job: Job, tokenizer: Any, conversations: Iterable[Messages]) -> list[Sample]:
    """The conversations with an answer, as tokens.

    Raises:
        ValueError: There are not two.
    """
    source, generated = f"--data {job.data}", job.answer_tokens is not None

    def encoded(chat: Messages) -> Sample | None:
        return encode(chat, tokenizer, job.max_length, generated=generated)

    found = render_all(conversations, encoded, source)
    samples = [sample for sample in found if sample is not None]
    if len(samples) >= 2:
        return samples
    if not generated and rewrites_answers(tokenizer):
        raise ValueError(
            f"{source}: the chat template of {job.target} renders answers otherwise than the "
            "target writes them, for example without its thoughts, so they cannot be found: have "
            "the target write answers with --regenerate"
        )
    fix = "give more conversations" if generated else "have the target write answers: --regenerate"
    raise ValueError(
        f"{source}: {len(samples)} conversations in it have an answer in their first "
        f"{job.max_length} tokens, and two are needed: {fix}, or choose a larger --max-length"
    )


def _conversations(job: Job, tokenizer: Any, longest: int, status: Status) -> Iterable[Messages]:
    conversations = read_conversations(job.data)
    if job.answer_tokens is None:
        return conversations
    context = min(_CONTEXT, longest)
    fitting = []
    # Refused conversations are found before the target is loaded, not in the middle of its answers.
    for chat in render_all(conversations, partial(renderable, tokenizer), f"--data {job.data}"):
        turns = [message["content"] for message in prompts(chat)]
        if not turns:
            continue
        # The turns, an answer to each, and the chat template around them.
        needed = sum(len(ids) for ids in tokenizer(turns)["input_ids"])
        needed += (job.answer_tokens + _TEMPLATE) * len(turns)
        if needed <= context:
            fitting.append(chat)
    if not fitting:
        raise ValueError(
            f"--data {job.data}: no conversation with a user turn leaves room for answers of "
            f"{job.answer_tokens} tokens in a context of {context}: give others, or choose a "
            "smaller --max-answer-tokens"
        )
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        status("the target answers", done, len(fitting))

    return read_conversations(
        regenerate(fitting, job.target, job.answer_tokens, context, job.out, advance)
    )


def _settings_file(out: Path) -> Path:
    return out / "training.json"


def _as_text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _write_settings(out: Path, settings: dict[str, Any]) -> None:
    """Write the file of settings, or leave the one before whole: without it no run is resumed."""
    file = _settings_file(out)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(_as_text(settings), encoding="utf-8")
    partial.replace(file)


def _check_unchanged(out: Path, settings: dict[str, Any]) -> None:
    """Check that an interrupted run is resumed with its own settings and data.

    Raises:
        ValueError: The settings or the data have changed.
    """
    file = _settings_file(out)
    if has_state(out) and file.exists() and file.read_text("utf-8") != _as_text(settings):
        raise ValueError(
            f"--out {out} holds an interrupted run with other settings or data, see {file}: repeat "
            "its command, or choose another folder"
        )


def _held_out(count: int, seed: int) -> set[int]:
    return set(random.Random(seed).sample(range(count), max(1, int(_HELD_OUT * count))))
