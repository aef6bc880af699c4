"""Files of tables survive kills, full disks, other writers and clocks; hostile ones are refused.

What needs a process of its own, or another user, runs in a forked one.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from safetensors.torch import save, save_file
from tree_kernels.source_stats import SourceStats

from drafttree.target import Target
from drafttree.testing import check_drafter
from recycle_plugin import METHOD, DynamicTreeDrafter, RecycleOptions, Tables, make_drafter
from recycle_plugin.storage import hot_start
from recycle_plugin.storage.hot_start import open_hot_start
from recycle_plugin.storage.primed_files import PrimedFile
from recycle_plugin.storage.table_files import (
    FORMAT,
    TableSaver,
    TablesError,
    TableSpec,
    claim,
    give_up,
    load_tables,
    save_tables,
)

IDENTITY = {"k": "8", "tokenizer": "none"}
EXPECTED = {"matrix": TableSpec((300, 8), vocab_size=300)}


class Recording(logging.Handler):
    """Keeps messages in a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def logger_of(messages: list[str]) -> logging.Logger:
    """A logger that writes to a list."""
    logger = logging.Logger("recording")
    logger.addHandler(Recording(messages))
    return logger


def tables(value: int) -> dict[str, torch.Tensor]:
    return {"matrix": torch.full((300, 8), value, dtype=torch.int32)}


def value_of(file: Path) -> int:
    (value,) = load_tables(file, EXPECTED, IDENTITY)["matrix"].unique().tolist()
    return int(value)


@contextmanager
def forked(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A forked process that calls a function, whose first argument is a pipe to this process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *arguments))
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def said(pipe: Connection) -> Any:
    assert pipe.poll(60)
    return pipe.recv()


def save_and_stop(pipe: Connection, file: Path, moment: str) -> None:
    def stop(*_: object) -> None:
        pipe.send("here")
        time.sleep(600)

    if moment == "while the file is written":
        os.fsync = stop  # type: ignore[assignment]
    else:
        Path.replace = stop  # type: ignore[method-assign, assignment]
    save_tables(file, tables(2), IDENTITY)


@pytest.mark.parametrize("moment", ["while the file is written", "before it is renamed"])
@pytest.mark.parametrize("name", ["tables", "tables[8b]"])
def test_a_writer_that_is_killed_leaves_the_old_file(
    tmp_path: Path, moment: str, name: str
) -> None:
    file = tmp_path / name
    save_tables(file, tables(1), IDENTITY)
    with forked(save_and_stop, file, moment) as (process, pipe):
        assert said(pipe) == "here"
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    (left,) = {*os.listdir(tmp_path)} - {name}
    assert left.endswith(".partial")
    assert value_of(file) == 1
    save_tables(file, tables(3), IDENTITY)
    assert value_of(file) == 3
    os.utime(tmp_path / left, (0, 0))
    save_tables(file, tables(4), IDENTITY)
    assert os.listdir(tmp_path) == [name]


def save_on_a_full_disk(pipe: Connection, file: Path) -> None:
    saver = TableSaver(file, lambda: tables(2), IDENTITY, every=3600)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    pipe.send([saver.save(), saver.save()])
    pipe.recv()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    pipe.send(saver.save())


def test_a_full_disk_keeps_the_old_file_and_saving_goes_on_later(tmp_path: Path) -> None:
    """As on a full disk, a file cannot grow."""
    file = tmp_path / "tables"
    save_tables(file, tables(1), IDENTITY)
    with forked(save_on_a_full_disk, file) as (_, pipe):
        assert said(pipe) == [False, False]
        assert os.listdir(tmp_path) == ["tables"]
        assert value_of(file) == 1
        pipe.send("there is room again")
        assert said(pipe) is True
    assert value_of(file) == 2
    assert os.listdir(tmp_path) == ["tables"]


def save_where_nothing_can_be_written(pipe: Connection, folder: Path) -> None:
    """Root may write everywhere, so it becomes another user, who may not know the way here."""
    os.chdir(folder)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
    told: list[str] = []
    file = rows_file(Path("cache") / "rows", told)
    for _ in range(2):
        file.save(tables(3)["matrix"])
    saver = TableSaver(Path("tables"), lambda: tables(2), IDENTITY, 3600, logger_of(told))
    pipe.send((told, [saver.save(), saver.save()], file.path))


def fill_the_disk_and_count(pipe: Connection, file: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    tried: list[float] = []

    def snapshot() -> dict[str, torch.Tensor]:
        tried.append(time.monotonic())
        return tables(2)

    saver = TableSaver(file, snapshot, IDENTITY, every=3600)
    saver.touch()
    while not tried:
        time.sleep(0.1)
    time.sleep(3)
    pipe.send(len(tried))


def test_an_idle_engine_does_not_try_to_save_again_at_once(tmp_path: Path) -> None:
    with forked(fill_the_disk_and_count, tmp_path / "tables") as (_, pipe):
        assert said(pipe) == 1


def test_a_cache_that_may_only_be_read_is_reported_once(tmp_path: Path) -> None:
    with forked(save_where_nothing_can_be_written, tmp_path) as (_, pipe):
        told, saved, path = said(pipe)
    assert [("DRAFTTREE_CACHE" in line, "make the folder writable" in line) for line in told] == [
        (True, False),
        (False, True),
    ]
    assert saved == [False, False]
    assert path is None
    assert os.listdir(tmp_path) == []


def load_where_nothing_may_be_entered(pipe: Connection, folder: Path) -> None:
    os.chdir(folder)
    folder.chmod(0o755)
    Path("cache").mkdir()
    Path("cache").chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    told: list[str] = []
    file = rows_file(Path("cache") / "rows", told)
    found = [file.load(300), file.load(300)]
    file.save(tables(3)["matrix"])
    pipe.send((told, found, file.path))


def test_a_cache_that_may_not_be_entered_is_reported_once(tmp_path: Path) -> None:
    with forked(load_where_nothing_may_be_entered, tmp_path) as (_, pipe):
        told, found, path = said(pipe)
    assert ["DRAFTTREE_CACHE" in line for line in told] == [True]
    assert found == [None, None]
    assert path is None


def rows_file(path: Path, told: list[str]) -> PrimedFile:
    """The cache file of a model whose files need not be there."""
    file = PrimedFile(None, 8, logger_of([]))
    file._identity = {"weights": "w", "tokenizer": "none", "k": "8"}
    file._logger, file.path = logger_of(told), path
    return file


def write_every_second_row(pipe: Connection, path: Path, first: int) -> None:
    told: list[str] = []
    file = rows_file(path, told)
    rows = torch.full((300, 8), -1, dtype=torch.int32)
    for row in range(first, 300, 2):
        rows[row] = row
        if row % 10 == first:
            file.save(rows)
    pipe.send("written")
    pipe.recv()
    file.save(rows)
    pipe.send(told)


def test_two_processes_share_one_cache(tmp_path: Path) -> None:
    """Each computes half of the rows, and saves them many times; a reader sees whole files."""
    path = tmp_path / "rows"
    with (
        forked(write_every_second_row, path, 0) as (_, one),
        forked(write_every_second_row, path, 1) as (_, other),
    ):
        for pipe in (one, other):
            assert said(pipe) == "written"
            assert all(found in (-1, row) for row, found in enumerate(rows_in(path)))
        for pipe in (one, other):
            pipe.send("once more")
            assert said(pipe) == []
    assert rows_in(path) == [*range(300)]
    assert os.listdir(tmp_path) == ["rows"]


def rows_in(path: Path) -> list[int]:
    return load_tables(path, EXPECTED, {"k": "8"})["matrix"][:, 0].tolist()


def empty_tables() -> Tables:
    return Tables(300, 8, torch.device("cpu"), bigrams=True, hot_start=True, memory=64)


def learn_and_save(pipe: Connection, file: Path) -> None:
    learned = empty_tables()
    learned.matrix.fill_(7)
    saver = open_hot_start(learned, file, file.parent, logger_of([]))
    assert saver is not None
    pipe.send(saver.save())
    pipe.recv()
    learned.matrix.fill_(9)
    saver.touch()
    saver.close()
    pipe.send("closed")


def test_two_engines_share_one_hot_start_file(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    told: list[str] = []
    with forked(learn_and_save, file) as (_, pipe):
        assert said(pipe) is True
        second = empty_tables()
        assert open_hot_start(second, file, tmp_path, logger_of(told)) is None
        assert "because another engine or replica does" in told[0]
        assert (second.matrix == 7).all()
        pipe.send("end")
        assert said(pipe) == "closed"
    third = empty_tables()
    saver = open_hot_start(third, file, tmp_path, logger_of(told))
    assert saver is not None
    saver.close()
    assert (third.matrix == 9).all()


def test_what_an_engine_saves_before_it_ends_is_loaded_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends while the second one starts: it has been loaded then, or is not saved."""
    file = tmp_path / "tables"
    with forked(learn_and_save, file) as (process, pipe):
        assert said(pipe) is True
        second = empty_tables()
        load = hot_start.load_tables

        def load_and_let_the_first_one_end(*arguments: Any) -> Any:
            loaded = load(*arguments)
            pipe.send("end")
            assert said(pipe) == "closed"
            process.join(60)
            return loaded

        with monkeypatch.context() as patched:
            patched.setattr(hot_start, "load_tables", load_and_let_the_first_one_end)
            assert open_hot_start(second, file, tmp_path, logger_of([])) is None
    third = empty_tables()
    saver = open_hot_start(third, file, tmp_path, logger_of([]))
    assert saver is not None
    saver.close()
    assert (third.matrix == 9).all()


@pytest.mark.parametrize("tree", ["dynamic", "static"])
def test_a_drafter_that_is_gone_has_saved_its_tables_and_given_the_file_up(
    tmp_path: Path, tree: str
) -> None:
    """So that an engine can be freed before its process ends."""
    file = tmp_path / "tables"
    options = METHOD.parse({"tree": tree, "prime": False, "hot_start": str(file)})
    target = Target("none", 300, torch.device("cpu"), torch.float32, logger_of([]))
    drafter = make_drafter(options, target)
    saver = drafter.tables.saver
    assert saver is not None
    tables = weakref.ref(drafter.tables)
    drafter.tables.matrix[5] = 7
    saver.touch()
    thread = saver._thread
    del drafter, saver
    gc.collect()
    thread.join(60)
    gc.collect()
    assert tables() is None
    with forked(claim_and_wait, file) as (_, pipe):
        assert said(pipe) is True
    assert make_drafter(options, target).tables.matrix[5].tolist() == [7] * 8


def claim_and_wait(pipe: Connection, file: Path) -> None:
    pipe.send(claim(file))
    pipe.recv()


def test_a_file_that_cannot_be_used_may_be_claimed_by_another_engine(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    file.write_bytes(b"damaged")
    assert open_hot_start(empty_tables(), file, tmp_path, logger_of([])) is None
    with forked(claim_and_wait, file) as (_, pipe):
        assert said(pipe) is True


def test_a_forked_process_does_not_have_its_parents_claim(tmp_path: Path) -> None:
    file = tmp_path / "tables"
    assert claim(file)
    with forked(claim_and_wait, file) as (_, pipe):
        assert said(pipe) is False
    give_up(file)
    with forked(claim_and_wait, file) as (_, pipe):
        assert said(pipe) is True


def open_as_another_user(pipe: Connection, file: Path, user: int) -> None:
    if os.geteuid() == 0:
        os.seteuid(user)
    told: list[str] = []
    saver = open_hot_start(empty_tables(), file, file.parent, logger_of(told))
    pipe.send((saver is not None, told))
    pipe.recv()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")
def test_engines_of_two_users_do_not_both_save_to_a_file(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    file = folder / "tables"
    try:
        with (
            forked(open_as_another_user, file, 65534) as (_, first),
            forked(open_as_another_user, file, 65533) as (_, second),
        ):
            opened = [said(first), said(second)]
    finally:
        shutil.rmtree(folder)
    assert sorted(saves for saves, _ in opened) == [False, True]
    ((message,),) = (told for saves, told in opened if not saves)
    assert "empty tables and will not save them, because an engine of another user may" in message
    assert f"delete {file.with_name('.tables.lock')}" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o644, 0o600])
@pytest.mark.parametrize("is_locked", [True, False])
def test_a_file_of_another_user_is_loaded_if_it_may_be_read(mode: int, is_locked: bool) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    file = folder / "tables"
    try:
        owner = empty_tables()
        saver = open_hot_start(owner, file, folder, logger_of([]))
        assert saver is not None
        owner.matrix.fill_(7)
        assert saver.save()
        saver.close()
        file.chmod(mode)
        if not is_locked:
            file.with_name(".tables.lock").unlink()
        with forked(load_as_another_user, file) as (_, pipe):
            value, (message,) = said(pipe)
    finally:
        shutil.rmtree(folder)
    if mode == 0o644:
        assert value == 7
        reason = "an engine of another user may" if is_locked else "this user has no permission to"
        start = f"starts with the tables in {file} and will not save them, because {reason}"
        assert start in message
    else:
        assert value == -1
        assert "starts with empty tables and will not save them: this user has no" in message
        assert f"permission to read {file}" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("exists", [False, True])
def test_files_that_root_writes_belong_to_those_they_are_for(tmp_path: Path, exists: bool) -> None:
    user, group = 65534, 65533
    file = tmp_path / "tables"
    if exists:
        save_tables(file, tables(1), IDENTITY)
        os.chown(file, user, group)
        file.chmod(0o640)
    else:
        os.chown(tmp_path, user, group)
    assert claim(file)
    give_up(file)
    lock = file.with_name(".tables.lock").stat()
    assert (lock.st_uid, lock.st_gid) == (user, group)
    if exists:
        save_tables(file, tables(2), IDENTITY)
        found = file.stat()
        assert (found.st_uid, found.st_gid, mode_of(file)) == (user, group, 0o640)
        assert value_of(file) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_group_that_a_file_cannot_keep_may_not_be_replaced_by_another_one() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    file = folder / "tables"
    try:
        save_tables(file, tables(1), IDENTITY)
        os.chown(file, 65534, 65533)
        file.chmod(0o664)
        with forked(save_as_another_user, file) as (_, pipe):
            said(pipe)
        found = file.stat()
    finally:
        shutil.rmtree(folder)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (65532, 0o604)


def save_as_another_user(pipe: Connection, file: Path) -> None:
    os.setegid(65532)
    os.seteuid(65532)
    save_tables(file, tables(2), IDENTITY)
    pipe.send(None)
    pipe.recv()


def load_as_another_user(pipe: Connection, file: Path) -> None:
    os.seteuid(65534)
    tables, told = empty_tables(), list[str]()
    assert open_hot_start(tables, file, file.parent, logger_of(told)) is None
    pipe.send((int(tables.matrix[5, 0]), told))
    pipe.recv()


def count_further(stats: SourceStats) -> None:
    stats.tried.add_(5)
    stats.hit.add_(5)


@pytest.mark.parametrize("change", [count_further, SourceStats.reset])
def test_counts_that_change_while_they_are_saved_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[SourceStats], None]
) -> None:
    file = tmp_path / "tables"
    learned = empty_tables()
    stats = learned.source_stats
    count_further(stats)
    saver = open_hot_start(learned, file, tmp_path, logger_of([]))
    assert saver is not None
    copy = torch.Tensor.to

    def copied_while_counting(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        copied = copy(tensor, *where, **how)
        if tensor is stats.tried or tensor is stats.hit:
            change(stats)
        return copied

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", copied_while_counting)
        assert saver.save()
    saver.close()
    told: list[str] = []
    again = open_hot_start(empty_tables(), file, tmp_path, logger_of(told))
    assert told == []
    assert again is not None
    again.close()


def test_large_counts_of_a_file_are_halved(tmp_path: Path) -> None:
    learned = empty_tables()
    stats = learned.source_stats
    stats.tried.fill_((1 << 31) - 1)
    stats.hit.fill_((1 << 30) - 1)
    saver = open_hot_start(learned, tmp_path / "tables", tmp_path, logger_of([]))
    assert saver is not None
    assert saver.save()
    saver.close()
    again = empty_tables()
    saver = open_hot_start(again, tmp_path / "tables", tmp_path, logger_of([]))
    assert saver is not None
    saver.close()
    assert bool((again.source_stats.tried == SourceStats.MOST_TRIED - 1).all())
    half = torch.full_like(stats.priors, 0.5)
    torch.testing.assert_close(again.source_stats.priors, half, atol=1e-4, rtol=0)


def test_a_clock_that_jumps_forward_costs_one_save_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer then takes the file that is being written for that of a killed one."""
    file = tmp_path / "tables"
    save_tables(file, tables(1), IDENTITY)
    now, fsync = time.time, os.fsync

    def jump(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(time, "time", lambda: now() + 1e6)
        save_tables(file, tables(2), IDENTITY)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", jump)
    with pytest.raises(FileNotFoundError):
        save_tables(file, tables(3), IDENTITY)
    assert value_of(file) == 2
    save_tables(file, tables(3), IDENTITY)
    assert value_of(file) == 3
    monkeypatch.setattr(time, "time", lambda: 0.0)  # and back
    save_tables(file, tables(4), IDENTITY)
    assert value_of(file) == 4
    assert os.listdir(tmp_path) == ["tables"]


def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        file = tmp_path / "above" / "folder" / "tables"
        saver = open_hot_start(empty_tables(), file, tmp_path, logger_of([]))
        assert saver is not None
        assert saver.save()
        saver.close()
        modes = {each.name: mode_of(each) for each in file.parent.iterdir()}
        assert modes == {"tables": 0o600, ".tables.lock": 0o600}
        assert mode_of(file.parent) == mode_of(file.parent.parent) == 0o700
        file.chmod(0o640)  # as its owner wants it
        save_tables(file, tables(2), IDENTITY)
        assert mode_of(file) == 0o640
    finally:
        os.umask(mask)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Payload:
    """Pickled, this makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._file),)


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_pickles_are_refused_and_not_run(tmp_path: Path, form: str) -> None:
    file, made = tmp_path / "tables", tmp_path / "made"
    if form == "pickle":
        file.write_bytes(pickle.dumps(Payload(made)))
    else:
        torch.save({"matrix": Payload(made)}, file)
    with pytest.raises(TablesError, match="is damaged, or not one of"):
        load_tables(file, EXPECTED, IDENTITY)
    assert not made.exists()


WHOLE = save(tables(5), {**IDENTITY, "format": FORMAT, "version": "1"})


@CASES
@given(data=st.data())
def test_damaged_files_are_refused_or_have_valid_tables(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(WHOLE)
    places = st.one_of(st.integers(0, 400), st.integers(0, len(content) - 1))
    for place in data.draw(st.lists(places, max_size=6)):
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    file = tmp_path_factory.mktemp("damaged") / "tables"
    file.write_bytes(content + data.draw(st.binary(max_size=8)))
    matrix = torch.zeros(300, 8)
    with suppress(TablesError):
        matrix = load_tables(file, EXPECTED, IDENTITY)["matrix"]
    assert matrix.shape == (300, 8)
    assert -1 <= int(matrix.min()) <= int(matrix.max()) < 300


numbers = st.integers(-(1 << 31), (1 << 31) - 1)


@CASES
@given(tried=numbers, hit=numbers, text=st.lists(st.integers(-3, 330), max_size=200))
def test_a_hostile_hot_start_file_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, tried: int, hit: int, text: list[int]
) -> None:
    file = tmp_path_factory.mktemp("hostile") / "tables"
    known = empty_tables()
    written = {
        "matrix": known.matrix,
        "pairs": torch.full_like(known.bigrams[None], 3),
        "tried_by_source": torch.full_like(known.source_stats.tried, tried),
        "hit_by_source": torch.full_like(known.source_stats.hit, hit),
        "memory": torch.tensor(text, dtype=torch.int32),
    }
    identity = {"tokenizer": "none", "k": "8", "vocabulary": "300"}
    save_file(written, file, {**identity, "format": FORMAT, "version": "1"})
    told: list[str] = []
    options = RecycleOptions(prime=False, memory=64, nodes=8, hot_start=file)
    target = Target(str(file.parent), 300, torch.device("cpu"), torch.float32, logger_of(told))
    drafter = METHOD.drafter(options, target)
    assert isinstance(drafter, DynamicTreeDrafter)
    check_drafter(drafter, options.num_draft_tokens, options.depth, target, steps=8)
    if drafter.tables.saver is not None:
        drafter.tables.saver.close()
    is_valid = 0 <= hit <= tried and all(-1 <= token < 300 for token in text)
    assert any("starts with empty tables" in line for line in told) is not is_valid
