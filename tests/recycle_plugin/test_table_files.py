"""Table files are loaded whole or refused, and a saver keeps them up to date."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recycle_plugin.storage.table_files import (
    FORMAT,
    TableSaver,
    TablesError,
    TableSpec,
    claim,
    load_tables,
    save_tables,
)

IDENTITY = {"tokenizer": "0123456789abcdef", "k": "2", "vocabulary": "5"}
EXPECTED = {
    "matrix": TableSpec((5, 2), torch.int32, vocab_size=5),
    "tags": TableSpec((3,), torch.int64),
}


def make_tables() -> dict[str, torch.Tensor]:
    matrix = torch.tensor([[0, 4], [-1, -1], [1, 2], [3, -1], [2, 1]], dtype=torch.int32)
    return {"matrix": matrix, "tags": torch.tensor([1 << 40, -7, 0])}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "tables.safetensors"
    save_tables(file, make_tables(), IDENTITY)
    return file


def wait_for(file: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until a saver's thread has written the file."""
    deadline = time.monotonic() + 60
    while not file.is_file():
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(0.05)


def test_idle_tables_are_saved(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    saver = TableSaver(file, Counter(), IDENTITY, every=3600)
    saver.touch()
    wait_for(file)
    saver.close()


def test_emptied_tables_are_saved_while_they_keep_changing(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    saver = TableSaver(file, Counter(), IDENTITY, every=3600)
    saver.touch_emptied()
    wait_for(file, saver.touch)
    saver.close()


def test_saved_tables_are_loaded(file: Path) -> None:
    loaded = load_tables(file, EXPECTED, IDENTITY)
    assert loaded.keys() == EXPECTED.keys()
    for name, table in make_tables().items():
        assert torch.equal(loaded[name], table)
    assert load_tables(file, {"tags": EXPECTED["tags"]}, {}).keys() == {"tags"}


def test_loaded_tables_outlive_the_file(file: Path) -> None:
    loaded = load_tables(file, EXPECTED, IDENTITY)
    os.truncate(file, 0)
    assert torch.equal(loaded["tags"], make_tables()["tags"])


def test_missing_folders_are_created_and_strided_tables_saved(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "tables.safetensors"
    columns = torch.arange(4, dtype=torch.int32).reshape(2, 2).T
    save_tables(file, {"matrix": columns}, {})
    assert torch.equal(load_tables(file, {"matrix": TableSpec((2, 2))}, {})["matrix"], columns)


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        ({"tokenizer": "f" * 16}, r"tokenizer 0123456789abcdef, but f{16} is served"),
        ({"k": "8"}, r"k 2, but 8 is served"),
        ({"vocabulary": "6"}, r"vocabulary 5, but 6 is served"),
        ({"weights": "a"}, r"weights unknown, but a is served"),
    ],
)
def test_files_with_another_identity_are_refused(
    file: Path, identity: dict[str, str], words: str
) -> None:
    with pytest.raises(TablesError, match=rf"tables\.safetensors .*{words}: give another file"):
        load_tables(file, EXPECTED, IDENTITY | identity)


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("matrix", TableSpec((5, 3)), r"is int32 \[5, 2\], not int32 \[5, 3\]: give another file"),
        ("matrix", TableSpec((5, 2), torch.int64), r"is int32 \[5, 2\], not int64 \[5, 2\]"),
        (
            "matrix",
            TableSpec((5, 2), vocab_size=4),
            r"has ids from -1 to 4, outside -1 to 3: .*delete",
        ),
        ("pairs", TableSpec((5, 2)), r"lacks pairs: delete it"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    file: Path, name: str, table: TableSpec, words: str
) -> None:
    with pytest.raises(TablesError, match=rf"tables\.safetensors.* {words}"):
        load_tables(file, {name: table}, IDENTITY)


def test_ids_below_minus_one_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tables.safetensors"
    save_tables(file, {"matrix": torch.full((5, 2), -2, dtype=torch.int32)}, {})
    with pytest.raises(TablesError, match="ids from -2 to -2"):
        load_tables(file, {"matrix": EXPECTED["matrix"]}, {})


def test_missing_damaged_and_foreign_files_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(TablesError, match=r"nothing is not a file: give the name"):
        load_tables(tmp_path / "nothing", EXPECTED, IDENTITY)
    whole = file.read_bytes()
    # The last one is somebody's own.
    others = (b"", b"\xff" * 100, b'{"text": "mine"}')
    for content in (whole[:-1], whole[:20], whole[:4], whole + b"x", *others):
        file.write_bytes(content)
        fix = "give another file, or delete it if it is one of Token Recycling's$"
        with pytest.raises(TablesError, match=rf"tables\.safetensors is damaged, or not .*: {fix}"):
            load_tables(file, EXPECTED, IDENTITY)
    save_file(make_tables(), file)
    with pytest.raises(TablesError, match=r"contains no Token Recycling tables: give another"):
        load_tables(file, EXPECTED, IDENTITY)
    save_file(make_tables(), file, IDENTITY | {"format": FORMAT, "version": "99"})
    with pytest.raises(TablesError, match=r"has version 99, but only 1 is supported: delete it"):
        load_tables(file, EXPECTED, IDENTITY)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        save_tables(file, {"matrix": torch.zeros(5, 2)}, {})
    assert os.listdir(file.parent) == [file.name]
    assert torch.equal(load_tables(file, EXPECTED, IDENTITY)["tags"], make_tables()["tags"])


def test_readers_see_whole_files_while_two_write(tmp_path: Path) -> None:
    file = tmp_path / "tables.safetensors"
    expected = {"matrix": TableSpec((1000, 8))}
    values = [torch.full((1000, 8), value, dtype=torch.int32) for value in (1, 2)]
    save_tables(file, {"matrix": values[0]}, {})

    def write(value: torch.Tensor) -> None:
        for _ in range(40):
            save_tables(file, {"matrix": value}, {})

    writers = [threading.Thread(target=write, args=(value,)) for value in values]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = load_tables(file, expected, {})["matrix"]
        assert any(torch.equal(found, value) for value in values)
    assert os.listdir(tmp_path) == [file.name]


def test_old_partial_files_of_killed_writers_are_removed(file: Path) -> None:
    old, new = (file.with_name(f".{file.name}.{name}.partial") for name in ("old", "new"))
    for partial in (old, new):
        partial.touch()
    os.utime(old, (0, 0))
    save_tables(file, make_tables(), IDENTITY)
    assert sorted(os.listdir(file.parent)) == sorted([file.name, new.name])


class Counter:
    """A `snapshot` that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.called = threading.Condition()

    def __call__(self) -> dict[str, torch.Tensor]:
        with self.called:
            self.calls += 1
            self.called.notify_all()
            return {"calls": torch.tensor([self.calls])}


def saved(file: Path) -> int:
    return int(load_tables(file, {"calls": TableSpec((1,), torch.int64)}, IDENTITY)["calls"])


def test_a_saver_saves_in_the_background_when_touched(tmp_path: Path) -> None:
    counter = Counter()
    saver = TableSaver(tmp_path / "tables", counter, IDENTITY, every=0.01)
    for calls in (1, 2):
        saver.touch()
        with counter.called:
            assert counter.called.wait_for(lambda calls=calls: counter.calls >= calls, timeout=30)
    saver.close()
    assert saved(tmp_path / "tables") == counter.calls


def test_a_saver_saves_on_request_and_when_closed(tmp_path: Path) -> None:
    file, counter = tmp_path / "tables", Counter()
    saver = TableSaver(file, counter, IDENTITY)
    assert saver.save()
    assert saved(file) == 1
    saver.touch()
    saver.close()
    assert saved(file) == 2
    saver.close()
    assert counter.calls == 2


def test_an_untouched_saver_writes_nothing(tmp_path: Path) -> None:
    TableSaver(tmp_path / "tables", Counter(), IDENTITY).close()
    assert os.listdir(tmp_path) == []


def test_repeated_failures_to_save_log_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.touch()  # a file, so the folder cannot be created
    saver = TableSaver(folder / "tables", Counter(), IDENTITY)
    with caplog.at_level(logging.WARNING):
        assert not saver.save()
        assert not saver.save()
    assert len(caplog.records) == 1
    assert str(folder / "tables") in caplog.text
    folder.unlink()
    saver.close()  # after a failure the tables still count as changed
    assert saved(folder / "tables") == 3


def test_a_saver_refuses_an_interval_of_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every=0 seconds is not positive"):
        TableSaver(tmp_path / "tables", Counter(), IDENTITY, every=0)


def save_and_exit(file: Path) -> None:
    saver = TableSaver(file, Counter(), IDENTITY)
    saver.touch()


def test_a_saver_saves_when_its_process_ends(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
import torch
from recycle_plugin.storage.table_files import TableSaver
saver = TableSaver(Path({str(tmp_path / "alone")!r}), lambda: {{"calls": torch.tensor([1])}},
    {IDENTITY!r})
saver.touch()
"""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
    assert saved(tmp_path / "alone") == 1
    forked = multiprocessing.get_context("fork").Process(
        target=save_and_exit, args=(tmp_path / "forked",)
    )
    forked.start()
    forked.join()
    assert saved(tmp_path / "forked") == 1


def test_one_process_at_a_time_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "tables"
    program = f"""
from pathlib import Path
from recycle_plugin.storage.table_files import claim
print(claim(Path({str(file)!r})), flush=True)
input()
"""
    path = os.pathsep.join(filter(None, sys.path))
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    assert not claim(file)
    assert claim(file.with_name("others"))
    other.communicate("\n")
    assert claim(file)
    assert claim(file)  # engines of one process follow one another
