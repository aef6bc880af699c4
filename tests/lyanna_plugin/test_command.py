"""`drafttree train lyanna`, from conversations to a drafter's folder."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import STRICT, WITHOUT_THOUGHTS
from quantised_models import quantise
from safetensors import SafetensorError
from tiny_models import make_tiny_chat_llama
from torch.distributed.run import get_args_parser
from typer.main import get_command
from typer.testing import CliRunner

from drafttree import deprecation
from drafttree.cli import app
from lyanna_plugin import checkpoint
from lyanna_plugin.checkpoint import load
from lyanna_plugin.training import features, trainer
from lyanna_plugin.training import run as module
from scripts.server_process import free_port


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.json"
    said = [
        {"from": who, "value": f"{what} {number}"}
        for number in range(3)
        for who, what in (("human", "What comes after"), ("gpt", "After that comes"))
    ]
    path.write_text(json.dumps([{"conversations": said}] * 6))
    return path


def command(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("train", "lyanna", "--target", str(target), "--data", str(data), "--out", str(out)),
        *("--epochs", "2", "--positions", "128", "--rank", "8", "--hot-tokens", "64", *more),
    ]


def train(target: Path, data: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, command(target, data, out, *more))


def test_training_writes_a_drafter_and_its_metrics(
    target: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "drafter"
    result = train(target, data, out)
    assert result.exit_code == 0, result.output
    assert load(out, target).config.num_hot_tokens == 64
    assert len(json.loads((out / "held_out.json").read_text())["conditional"]) == 3
    assert json.loads((out / "training.json").read_text())["conversations"] == 5
    assert (out / "training.png").stat().st_size > 1000
    again = train(target, data, out)
    assert again.exit_code == 2
    assert "already holds a drafter" in again.output


def test_missing_libraries_are_named_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    absent = ("accelerate", "matplotlib")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in absent else find(name)
    )
    result = train(tmp_path, tmp_path, tmp_path / "drafter")
    assert result.exit_code == 2
    assert "error: accelerate, matplotlib missing: pip install '.[train]'" in result.output


def test_a_folder_that_cannot_be_made_is_refused(target: Path, data: Path) -> None:
    out = data / "drafter"
    result = train(target, data, out)
    assert result.exit_code == 2
    assert f"--out {out} cannot be written (Not a directory): choose another" in result.output


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_training_starts_from_another_drafter(
    target: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(deprecation, "_WARNED", set())
    first, out = tmp_path / "first", tmp_path / "second"
    more = ("--epochs", "8", "--learning-rate", "1e-3")
    assert train(target, data, first, *more).exit_code == 0
    other = train(target, data, out, *more, "--start-from", str(first), "--rank", "4")
    assert other.exit_code == 2
    assert "has token_info_rank=8, not 4" in other.output
    assert not out.exists()
    assert train(target, data, out, *more, "--start-from", str(first)).exit_code == 0
    assert losses(out)[0] < 0.95 * losses(first)[0]
    assert load(out, target).config == load(first, target).config
    assert "deprecated" not in caplog.text
    again = tmp_path / "again"
    assert train(target, data, again, *more, "--start", str(first)).exit_code == 0
    assert losses(again) == losses(out)
    assert "--start of `drafttree train lyanna` is deprecated" in caplog.text


@pytest.mark.full
def test_a_quantised_target_is_trained_for_alike_with_hidden_states_that_are_stored(
    target: Path, data: Path, tmp_path: Path
) -> None:
    folder = quantise(target, Path(shutil.copytree(target, tmp_path / "target")), "int8")
    whole, *outs = (tmp_path / name for name in ("whole", "first", "second"))
    assert train(target, data, whole).exit_code == 0
    for out in outs:
        result = train(folder, data, out, "--cache", str(tmp_path / "features"))
        assert result.exit_code == 0, result.output
    assert losses(outs[0]) == losses(outs[1])
    assert losses(outs[0])[0] == pytest.approx(losses(whole)[0], rel=0.05)


def test_formats_that_cannot_be_dequantised_are_refused_first(
    target: Path, data: Path, tmp_path: Path
) -> None:
    folder = quantise(target, Path(shutil.copytree(target, tmp_path / "target")), "gptq")
    result = train(folder, data, tmp_path / "drafter", "--regenerate")
    assert result.exit_code == 2, result.output
    assert "is quantised with quant_method='gptq'" in result.output
    assert not (tmp_path / "drafter").exists()


def test_two_processes_train_one_drafter(target: Path, data: Path, tmp_path: Path) -> None:
    assert train(target, data, tmp_path / "alone").exit_code == 0
    arguments = [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("-m", "drafttree.cli", *command(target, data, tmp_path / "drafter")),
    ]
    process = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    assert load(tmp_path / "drafter", target).config.num_hot_tokens == 64
    alone, both = (losses(tmp_path / name) for name in ("alone", "drafter"))
    assert len(both) == len(alone) // 2
    # Each step takes two batches, so the first loss is their mean.
    assert both[0] == pytest.approx(sum(alone[:2]) / 2, rel=0.05)


def test_torchrun_refuses_no_option() -> None:
    """An option whose name begins two of its own ends torchrun as ambiguous."""
    parameters = get_command(app).commands["train"].commands["lyanna"].params
    options = [option for each in parameters if not each.hidden for option in each.opts]
    assert "--start-from" in options
    get_args_parser().parse_args(["-m", "drafttree.cli", "train", "lyanna", *options])
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["-m", "drafttree.cli", "train", "lyanna", "--start"])


def test_an_interrupted_run_only_resumes_with_the_same_settings(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drafter"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    settings = partial(trainer.TrainingSettings, save_every=2)
    monkeypatch.setattr(trainer, "TrainingSettings", settings)
    with monkeypatch.context() as patch:
        patch.setattr(module, "measure", interrupt)
        result = train(target, data, out)
    assert result.exit_code == 130
    assert "repeat the command to resume" in result.output
    # The drafter is there already, and only its figures are missing.
    trained = load(out, target).state_dict()
    assert not (out / "held_out.json").exists()
    other = train(target, data, out, "--learning-rate", "1e-3")
    assert other.exit_code == 2
    assert "interrupted run with other settings" in other.output
    result = train(target, data, out)
    assert result.exit_code == 0, result.output
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert (out / "held_out.json").exists()
    again = load(out, target).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in trained.items())
    assert not trainer.has_state(out)


class FullDisk:
    """Replaces a function that writes a file: all that it gets written is the file's first byte."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, _: Any, file: str | Path, *__: Any, **___: Any) -> None:
        Path(file).write_bytes(b"{")
        raise self._error


@pytest.mark.parametrize(
    ("module_of_writer", "writer", "error", "complaint"),
    [
        (features, "save_file", SafetensorError, r"-features/\w+.safetensors cannot be written"),
        (torch, "save", RuntimeError, "the checkpoint .* cannot be written"),
        (checkpoint, "save_file", SafetensorError, "drafter/.model.* cannot be written"),
    ],
)
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(
    target: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module_of_writer: Any,
    writer: str,
    error: type[Exception],
    complaint: str,
) -> None:
    out = tmp_path / "drafter"
    with monkeypatch.context() as patch:
        patch.setattr(module_of_writer, writer, FullDisk(error("No space left on device")))
        result = train(target, data, out)
    assert result.exit_code == 1, result.output
    assert re.search(rf"error: .*{complaint} .*No space left on device", result.output)
    again = train(target, data, out)
    assert again.exit_code == 0, again.output
    assert load(out, target).config.num_hot_tokens == 64


def test_the_settings_of_an_interrupted_run_outlive_a_full_disk(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "drafter"
    write = Path.write_text

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(file: Path, text: str, **options: Any) -> None:
        if "training.json" in file.name:
            write(file, "")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "measure", interrupt)
        assert train(target, data, out).exit_code == 130
    assert trainer.has_state(out)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        result = train(target, data, out)
    assert result.exit_code == 1, result.output
    assert "No space left on device" in result.output
    result = train(target, data, out)
    assert result.exit_code == 0, result.output
    assert not list(out.glob(".*"))


def test_each_stage_shows_its_own_numbers(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stages(job: module.Job, status: module.Status, report: Any) -> None:
        status("the first stage", 3, 7)
        status("the second stage")
        raise ValueError("the end")

    monkeypatch.setattr(module, "run", stages)
    result = train(target, data, tmp_path / "drafter")
    assert "the second stage" in result.output
    assert "/7" not in result.output


def test_a_drafter_in_the_current_folder_has_its_features_beside_it(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[module.Job] = []

    def refuse(job: module.Job, *_: Any) -> None:
        jobs.append(job)
        raise ValueError("no training here")

    monkeypatch.setattr(module, "run", refuse)
    (tmp_path / "drafter").mkdir()
    monkeypatch.chdir(tmp_path / "drafter")
    assert train(target, data, Path()).exit_code == 2
    assert jobs[0].cache == tmp_path / "drafter-features"
    result = train(target, data, Path(), "--steps", "65")
    assert result.exit_code == 2
    assert len(jobs) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "is not JSON"),
        ('[{"turns": ["Only a question"]}]', "0 conversations in it have an answer"),
    ],
)
def test_wrong_data(target: Path, tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(text)
    result = train(target, file, tmp_path / "drafter")
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.mark.parametrize(
    ("template", "more", "complaint"),
    [
        (WITHOUT_THOUGHTS, (), "renders answers otherwise than the target writes them"),
        (STRICT, (), "refuses all conversations (roles must alternate)"),
        (STRICT, ("--regenerate",), "refuses all conversations (roles must alternate)"),
    ],
)
def test_templates_that_do_not_fit_are_found_before_the_target_is_loaded(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    more: tuple[str, ...],
    complaint: str,
) -> None:
    folder = shutil.copytree(target, tmp_path / "target")
    (folder / "chat_template.jinja").write_text(template)
    said = [{"from": who, "value": "Hello"} for who in ("system", "human", "gpt")]
    chat = said[1:] if template == WITHOUT_THOUGHTS else said
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"conversations": chat}] * 3))
    monkeypatch.delattr("transformers.AutoModelForCausalLM.from_pretrained")
    monkeypatch.setattr(module, "regenerate", None)
    result = train(folder, file, tmp_path / "drafter", *more)
    assert result.exit_code == 2, result.output
    assert complaint in result.output


def test_only_conversations_with_a_question_are_regenerated(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def refuse(conversations: Any, *_: Any) -> None:
        asked.extend(conversations)
        raise ValueError("no answers here")

    monkeypatch.setattr(module, "regenerate", refuse)
    file = tmp_path / "data.json"
    chats = [
        [{"from": who, "value": "Hello"} for who in roles]
        for roles in (("system",), ("human", "system"), ("system", "gpt"))
    ]
    file.write_text(json.dumps([{"conversations": chat} for chat in chats]))
    result = train(target, file, tmp_path / "drafter", "--regenerate")
    assert "no answers here" in result.output
    assert [[turn["role"] for turn in chat] for chat in asked] == [["user", "system"]]
    file.write_text(json.dumps([{"conversations": chats[0]}]))
    result = train(target, file, tmp_path / "drafter", "--regenerate")
    assert result.exit_code == 2, result.output
    assert "no conversation with a user turn leaves room" in result.output


def test_wrong_target(data: Path, tmp_path: Path) -> None:
    result = train(tmp_path / "absent", data, tmp_path / "drafter")
    assert result.exit_code == 2
    assert "cannot be read" in result.output
