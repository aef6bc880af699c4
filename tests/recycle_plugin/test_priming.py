"""Priming fills the matrix with the model's top tokens after [BOS, t], also if interrupted."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import Result
from tiny_models import make_tiny_llama
from typer.testing import CliRunner

from drafttree.cli import app
from recycle_plugin.storage import priming
from recycle_plugin.storage.background import BackgroundPriming
from recycle_plugin.storage.primed_files import (
    load_primed,
    num_primed_rows,
    partial_file,
    primed_file,
    primed_identity,
    save_primed,
)
from recycle_plugin.storage.priming import CHUNK, prime

VOCAB = 5 * CHUNK + 100
K = 8
SECONDS = 300.0  # timeout of waits: priming runs at the lowest priority on a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose BOS is 3, with a tokenizer's file."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, sharpness=1.0)
    set_bos(folder, 3)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTTREE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    """The primed matrix from one forward of all `[BOS, t]`."""
    return direct(model, 3)


def set_bos(folder: Path, bos: int | None) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"bos_token_id": bos}))


@torch.inference_mode()
def direct(folder: Path, bos: int | None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(VOCAB)[:, None]
    if bos is not None:
        tokens = torch.cat((torch.full_like(tokens, bos), tokens), 1)
    return model(tokens).logits[:, -1].topk(K).indices.int()


def load(file: Path, model: Path) -> torch.Tensor:
    return load_primed(file, primed_identity(model, K), VOCAB)


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """Fraction of equal entries: equal logits may swap ranks between batch sizes."""
    return (a == b).float().mean().item()


def collect(primed: BackgroundPriming) -> torch.Tensor:
    """All rows that priming delivers until it ends; -1 in other rows."""
    matrix = torch.full((VOCAB, K), -1, dtype=torch.int32)
    give_up = time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < give_up
        running = primed.running
        rows = primed.poll()
        if rows is not None:
            assert num_primed_rows(matrix) == rows.first
            matrix[rows.first : rows.first + len(rows.candidates)] = rows.candidates
        elif not running:
            return matrix
        else:
            time.sleep(0.02)


@pytest.fixture
def begin(model: Path) -> Iterator[Callable[..., BackgroundPriming | None]]:
    begun: list[BackgroundPriming] = []

    def begin(folder: Path | str = model, vocab_size: int = VOCAB) -> BackgroundPriming | None:
        primed = BackgroundPriming.start(folder, K, vocab_size, poll_seconds=0.05)
        if primed is not None:
            begun.append(primed)
        return primed

    yield begin
    for primed in begun:
        primed.close()


def test_rows_are_the_models_top_tokens_after_bos_and_the_token(
    model: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    seen: list[int] = []
    prime(model, tmp_path / "out", K, report=lambda made, rows: seen.append(made))
    made = load(tmp_path / "out", model)
    assert agreement(made, expected) > 0.999
    assert agreement(made, direct(model, None)) < 0.9
    assert seen[0] == 0
    assert seen[-1] == VOCAB
    assert sorted(seen) == seen
    assert not partial_file(tmp_path / "out").exists()


def test_a_model_without_bos_is_primed_on_the_token_alone(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    set_bos(folder, None)
    prime(folder, tmp_path / "out", K)
    assert agreement(load(tmp_path / "out", folder), direct(folder, None)) > 0.999
    assert primed_file(folder, K) != primed_file(model, K)


@pytest.mark.parametrize(
    ("native", "free", "dtype"),
    [(False, 1 << 40, torch.float32), (True, 1 << 40, torch.bfloat16), (False, 0, torch.bfloat16)],
)
def test_a_cpu_without_bfloat16_runs_in_float32_if_that_fits(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    free: int,
    dtype: torch.dtype,
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
    stored = (folder / "model.safetensors").stat().st_size
    memory = SimpleNamespace(available=free or int(1.5 * stored))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    assert priming._load_model(folder, "cpu").dtype == dtype


def test_interrupted_priming_continues_to_the_same_matrix(model: Path, tmp_path: Path) -> None:
    prime(model, tmp_path / "whole", K)
    out = tmp_path / "out"

    def interrupt(made: int, rows: int) -> None:
        if made >= 3 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prime(model, out, K, report=interrupt)
    partial = load(partial_file(out), model)
    assert num_primed_rows(partial) == 3 * CHUNK
    assert (partial[3 * CHUNK :] == -1).all()
    seen: list[int] = []
    prime(model, out, K, report=lambda made, rows: seen.append(made))
    assert seen[:3] == [0, 3 * CHUNK, 4 * CHUNK]
    assert torch.equal(load(out, model), load(tmp_path / "whole", model))


def test_a_finished_matrix_is_only_computed_again_if_it_is_damaged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prime(model, out, K)
    whole, made = out.read_bytes(), load(out, model)
    loads: list[str] = []
    load_model = priming._load_model

    def counted(folder: Path, device: str) -> Any:
        loads.append(device)
        return load_model(folder, device)

    monkeypatch.setattr(priming, "_load_model", counted)
    prime(model, out, K)
    assert not loads
    out.write_bytes(whole[:-100])
    partial_file(out).write_bytes(whole[:100])
    prime(model, out, K)
    assert torch.equal(load(out, model), made)
    assert len(loads) == 1


def test_two_primings_at_once_compute_the_matrix_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load_model = priming._load_model
    other_waits = threading.Event()

    def counted(folder: Path, device: str) -> Any:
        loads.append(device)
        assert other_waits.wait(SECONDS)
        return load_model(folder, device)

    monkeypatch.setattr(priming, "_load_model", counted)
    starts: list[int] = []

    def report(made: int, rows: int) -> None:
        if made == 0:
            starts.append(made)
        if len(starts) >= 3:  # both before taking the lock, and one with it
            other_waits.set()

    threads = [
        threading.Thread(target=prime, args=(model, tmp_path / "out", K, "cpu", report))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert num_primed_rows(load(tmp_path / "out", model)) == VOCAB


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "unheard_of"}, r"cannot read .*config\.json"),
        ({"hidden_size": 64}, r"transformers cannot load the model in"),
    ],
)
def test_models_that_do_not_load_are_refused(
    model: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=words):
        prime(folder, tmp_path / "out", K)
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priming, "_MEMORY_FACTOR", 1e9)
    with pytest.raises(ValueError, match=r"needs \d+\.\d GiB of memory on cpu, but only \d"):
        prime(model, tmp_path / "out", K)
    with pytest.raises(ValueError, match=rf"a vocabulary of {VOCAB}, but 7 logits are served"):
        prime(model, tmp_path / "out", K, vocab_size=7)
    with pytest.raises(ValueError, match=r"k=9999 is not between 1 and"):
        prime(model, tmp_path / "out", 9999)


def test_an_engine_is_primed_in_the_background_and_the_next_one_at_once(
    model: Path,
    expected: torch.Tensor,
    cache: Path,
    begin: Callable[..., BackgroundPriming | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        first, second = begin(), begin()
        assert first is not None
        assert second is not None
        assert first.poll() is second.poll() is None
        for primed in (first, second):
            assert agreement(collect(primed), expected) > 0.999
            assert primed.finished
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert primed_file(model, K).is_relative_to(cache)
    later = begin()
    assert later is not None
    assert later.finished
    assert not later.running
    assert agreement(collect(later), expected) > 0.999


def test_a_partial_matrix_is_continued_and_a_damaged_one_computed_again(
    model: Path, expected: torch.Tensor, cache: Path, begin: Callable[..., BackgroundPriming | None]
) -> None:
    file = primed_file(model, K)
    matrix = torch.full((VOCAB, K), -1, dtype=torch.int32)
    matrix[:10] = 5
    save_primed(partial_file(file), matrix, primed_identity(model, K))
    file.write_bytes(b"damaged")
    primed = begin()
    assert primed is not None
    made = collect(primed)
    assert torch.equal(made[:10], matrix[:10])
    assert agreement(made[10:], expected[10:]) > 0.999
    assert torch.equal(load(file, model), made)


def test_without_a_writable_cache_a_temporary_folder_is_used(
    model: Path,
    expected: torch.Tensor,
    cache: Path,
    begin: Callable[..., BackgroundPriming | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.touch()  # a file, so the folder cannot be created
    primed = begin()
    assert primed is not None
    assert agreement(collect(primed), expected) > 0.999
    (record,) = [r for r in caplog.records if r.levelno > logging.INFO]
    assert "set DRAFTTREE_CACHE" in record.message
    assert not primed._file.parent.exists()


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("org/model", "org/model is not a local folder"),
        ("empty", "empty has no .safetensors file"),
    ],
)
def test_a_model_that_cannot_be_primed_logs_one_warning(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, folder: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert BackgroundPriming.start(tmp_path / folder, K, VOCAB) is None
    (record,) = caplog.records
    assert words in record.message


def test_a_failure_in_the_background_logs_one_warning(
    model: Path,
    cache: Path,
    begin: Callable[..., BackgroundPriming | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    primed = begin(vocab_size=7)
    assert primed is not None
    assert num_primed_rows(collect(primed)) == 0
    (record,) = [r for r in caplog.records if r.levelno > logging.INFO]
    assert f"a vocabulary of {VOCAB}, but 7 logits are served" in record.message


@pytest.fixture
def busy(model: Path, cache: Path) -> Iterator[None]:
    """Another process holds the lock of the file and never finishes."""
    lock = primed_file(model, K).with_suffix(".safetensors.lock")
    lock.parent.mkdir(parents=True)
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def wait_until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def ended(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def child_in(text: str) -> int | None:
    found = re.search(r"by process (\d+)", text)
    return int(found[1]) if found else None


@pytest.mark.usefixtures("busy")
def test_closing_ends_the_process_which_ran_at_the_lowest_priority(
    begin: Callable[..., BackgroundPriming | None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        primed = begin()
        assert primed is not None
        assert primed.poll() is None
        wait_until(lambda: child_in(caplog.text) is not None)
    child = child_in(caplog.text)
    assert child is not None
    assert os.sched_getscheduler(child) == os.SCHED_IDLE or os.getpriority(0, child) == 19
    assert not ended(child)
    primed.close()
    assert ended(child)
    assert not primed.running
    primed.close()


@pytest.mark.usefixtures("busy")
def test_the_process_ends_with_its_parent(model: Path) -> None:
    program = f"""
import logging, sys
from recycle_plugin.storage.background import BackgroundPriming
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
primed = BackgroundPriming.start({str(model)!r}, {K}, {VOCAB})
primed.poll()
sys.stdin.read()
"""
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = next(filter(None, map(child_in, parent.stdout)))
    assert not ended(child)
    parent.kill()
    parent.communicate()
    wait_until(lambda: ended(child))


def prepare(method: str, folder: Path) -> Result:
    return CliRunner().invoke(app, ["prepare", "--method", method, "--model", str(folder)])


def test_the_command_prepares_and_reports_every_tenth(
    model: Path, expected: torch.Tensor, cache: Path
) -> None:
    result = prepare("token-recycling", model)
    assert result.exit_code == 0, result.stderr
    reported = re.findall(rf"Priming Token Recycling: (\d+) of {VOCAB} tokens", result.stderr)
    assert [int(made) for made in reported] == [0, *range(CHUNK, VOCAB, CHUNK), VOCAB]
    file = primed_file(model, K)
    assert str(file) in result.stderr
    assert agreement(load(file, model), expected) > 0.999


def test_errors_of_the_command(model: Path, cache: Path, tmp_path: Path) -> None:
    for method, folder, words in (
        ("nothing", model, "unknown method 'nothing'"),
        ("rsd", model, "needs no preparation. Methods that do: token_"),
        ("token-recycling", tmp_path / "none", "is not a folder"),
        ("token-recycling", tmp_path, "has no .safetensors file"),
    ):
        result = prepare(method, folder)
        assert result.exit_code == 2
        assert words in result.stderr
    cache.touch()
    result = prepare("token-recycling", model)
    assert result.exit_code == 1
    assert str(cache) in result.stderr
