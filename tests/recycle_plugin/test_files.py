"""Files of tables are whole or refused, and a keeper keeps them up to date."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recycle_plugin.files import FORMAT, Keeper, Table, TablesError, load_tables, save_tables

IDENTITY = {"tokenizer": "0123456789abcdef", "k": "2", "vocabulary": "5"}
EXPECTED = {
    "matrix": Table((5, 2), torch.int32, vocab_size=5),
    "tags": Table((3,), torch.int64),
}


def make_tables() -> dict[str, torch.Tensor]:
    matrix = torch.tensor([[0, 4], [-1, -1], [1, 2], [3, -1], [2, 1]], dtype=torch.int32)
    return {"matrix": matrix, "tags": torch.tensor([1 << 40, -7, 0])}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "tables.safetensors"
    save_tables(file, make_tables(), IDENTITY)
    return file


def test_tables_that_rest_are_saved_without_being_asked(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    keeper = Keeper(file, Counter(), IDENTITY, every=3600)
    keeper.touch()
    deadline = time.monotonic() + 60
    while not file.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    keeper.close()


def test_what_was_saved_is_loaded(file: Path) -> None:
    loaded = load_tables(file, EXPECTED, IDENTITY)
    assert loaded.keys() == EXPECTED.keys()
    for name, table in make_tables().items():
        assert torch.equal(loaded[name], table)
    assert load_tables(file, {"tags": EXPECTED["tags"]}, {}).keys() == {"tags"}


def test_what_is_loaded_outlives_the_file(file: Path) -> None:
    loaded = load_tables(file, EXPECTED, IDENTITY)
    os.truncate(file, 0)
    assert torch.equal(loaded["tags"], make_tables()["tags"])


def test_folders_are_made_and_strided_tables_saved(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "tables.safetensors"
    columns = torch.arange(4, dtype=torch.int32).reshape(2, 2).T
    save_tables(file, {"matrix": columns}, {})
    assert torch.equal(load_tables(file, {"matrix": Table((2, 2))}, {})["matrix"], columns)


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        ({"tokenizer": "f" * 16}, r"another tokenizer, 0123456789abcdef, and f{16} is served"),
        ({"k": "8"}, r"another k, 2, and 8 is served"),
        ({"vocabulary": "6"}, r"another vocabulary, 5, and 6 is served"),
        ({"weights": "a"}, r"another weights, unknown, and a is served"),
    ],
)
def test_files_of_something_else_are_refused(
    file: Path, identity: dict[str, str], words: str
) -> None:
    with pytest.raises(TablesError, match=rf"tables\.safetensors .*{words}: name another file"):
        load_tables(file, EXPECTED, IDENTITY | identity)


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("matrix", Table((5, 3)), r"is int32 \[5, 2\], not int32 \[5, 3\]: name another file"),
        ("matrix", Table((5, 2), torch.int64), r"is int32 \[5, 2\], not int64 \[5, 2\]"),
        (
            "matrix",
            Table((5, 2), vocab_size=4),
            r"holds ids from -1 to 4, .* between -1 and 3.*delete",
        ),
        ("pairs", Table((5, 2)), r"lacks pairs: delete it"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    file: Path, name: str, table: Table, words: str
) -> None:
    with pytest.raises(TablesError, match=rf"tables\.safetensors.* {words}"):
        load_tables(file, {name: table}, IDENTITY)


def test_ids_below_minus_one_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tables.safetensors"
    save_tables(file, {"matrix": torch.full((5, 2), -2, dtype=torch.int32)}, {})
    with pytest.raises(TablesError, match="ids from -2 to -2"):
        load_tables(file, {"matrix": EXPECTED["matrix"]}, {})


def test_missing_damaged_and_foreign_files_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(TablesError, match=r"nothing is no file: name one"):
        load_tables(tmp_path / "nothing", EXPECTED, IDENTITY)
    whole = file.read_bytes()
    for part in (whole[:-1], whole[:20], whole[:4], b"", b"\xff" * 100, whole + b"x"):
        file.write_bytes(part)
        with pytest.raises(TablesError, match=r"tables\.safetensors is damaged.*delete it"):
            load_tables(file, EXPECTED, IDENTITY)
    save_file(make_tables(), file)
    with pytest.raises(TablesError, match=r"holds no tables of Token Recycling: name another"):
        load_tables(file, EXPECTED, IDENTITY)
    save_file(make_tables(), file, IDENTITY | {"format": FORMAT, "version": "99"})
    with pytest.raises(TablesError, match=r"is of version 99, and 1 is known here: delete it"):
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
    expected = {"matrix": Table((1000, 8))}
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


def test_what_a_killed_writer_left_is_removed_after_a_while(file: Path) -> None:
    old, new = (file.with_name(f".{file.name}.{name}.partial") for name in ("old", "new"))
    for partial in (old, new):
        partial.touch()
    os.utime(old, (0, 0))
    save_tables(file, make_tables(), IDENTITY)
    assert sorted(os.listdir(file.parent)) == sorted([file.name, new.name])


class Counter:
    """Tables that say how often they were looked at."""

    def __init__(self) -> None:
        self.looks = 0
        self.looked = threading.Condition()

    def __call__(self) -> dict[str, torch.Tensor]:
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
            return {"looks": torch.tensor([self.looks])}


def saved(file: Path) -> int:
    return int(load_tables(file, {"looks": Table((1,), torch.int64)}, IDENTITY)["looks"])


def test_a_keeper_saves_in_the_background_when_touched(tmp_path: Path) -> None:
    counter = Counter()
    keeper = Keeper(tmp_path / "kept", counter, IDENTITY, every=0.01)
    for looks in (1, 2):
        keeper.touch()
        with counter.looked:
            assert counter.looked.wait_for(lambda looks=looks: counter.looks >= looks, timeout=30)
    keeper.close()
    assert saved(tmp_path / "kept") == counter.looks


def test_a_keeper_saves_on_request_and_a_last_time(tmp_path: Path) -> None:
    file, counter = tmp_path / "kept", Counter()
    keeper = Keeper(file, counter, IDENTITY)
    assert keeper.save()
    assert saved(file) == 1
    keeper.touch()
    keeper.close()
    assert saved(file) == 2
    keeper.close()
    assert counter.looks == 2


def test_an_untouched_keeper_writes_nothing(tmp_path: Path) -> None:
    Keeper(tmp_path / "kept", Counter(), IDENTITY).close()
    assert os.listdir(tmp_path) == []


def test_a_failure_to_save_is_one_warning_until_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.touch()  # no folder can be made there
    keeper = Keeper(folder / "kept", Counter(), IDENTITY)
    with caplog.at_level(logging.WARNING):
        assert not keeper.save()
        assert not keeper.save()
    assert len(caplog.records) == 1
    assert str(folder / "kept") in caplog.text
    folder.unlink()
    keeper.close()  # what could not be saved counts as changed
    assert saved(folder / "kept") == 3


def test_a_keeper_refuses_to_save_all_the_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every=0 seconds is too often"):
        Keeper(tmp_path / "kept", Counter(), IDENTITY, every=0)


def keep_and_end(file: Path) -> None:
    keeper = Keeper(file, Counter(), IDENTITY)
    keeper.touch()


def test_a_keeper_saves_when_its_process_ends(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
import torch
from recycle_plugin.files import Keeper
keeper = Keeper(Path({str(tmp_path / "alone")!r}), lambda: {{"looks": torch.tensor([1])}},
    {IDENTITY!r})
keeper.touch()
"""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
    assert saved(tmp_path / "alone") == 1
    forked = multiprocessing.get_context("fork").Process(
        target=keep_and_end, args=(tmp_path / "forked",)
    )
    forked.start()
    forked.join()
    assert saved(tmp_path / "forked") == 1
