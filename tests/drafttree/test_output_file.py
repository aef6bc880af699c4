"""Files that cannot be written are refused at first, and a failure leaves what was there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drafttree.bench.errors import InputError
from drafttree.cli import app
from drafttree.cli.output_file import check_output, write_output

RUN = Path(__file__).parents[2] / "results" / "vllm-cpu" / "float32-auto-batch-1.json"


def test_a_file_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output("--json", tmp_path / "new.json", {})
    (tmp_path / "old.json").touch()
    check_output("--json", tmp_path / "old.json", {})
    monkeypatch.chdir(tmp_path)
    check_output("--json", Path("new.json"), {})


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"the folder of .* does not exist"):
        check_output("--json", tmp_path / "absent" / "new.json", {})
    with pytest.raises(InputError, match="is a folder: name a file for --json"):
        check_output("--json", tmp_path, {})
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(InputError, match=r"one cannot be written \(Too many .*\): name another"):
        check_output("--json", tmp_path / "one", {})
    (tmp_path / "old.json").touch()
    for refused, name in ((tmp_path, "new.json"), (tmp_path / "old.json", "old.json")):
        monkeypatch.setattr(os, "access", lambda place, mode, refused=refused: place != refused)
        with pytest.raises(InputError, match="cannot be written: name another file for --json"):
            check_output("--json", tmp_path / name, {})


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["bench", "--method", "none", "--model", "absent"], "--output"),
        (["report", "."], "--output"),
        (["trace", "--method", "token-recycling", "--model", "absent"], "--json"),
        (["trace", "--method", "token-recycling", "--model", "absent"], "--html"),
        (["tree", "absent", "--fit", "3"], "--output"),
        (["tree", "absent"], "--picture"),
    ],
)
def test_commands_look_at_their_files_first(
    tmp_path: Path, command: list[str], option: str
) -> None:
    result = CliRunner().invoke(app, [*command, option, str(tmp_path)])
    assert result.exit_code == 2
    assert f"is a folder: name a file for {option}" in " ".join(result.output.split())


def test_a_file_that_is_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").touch()
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "dangling").symlink_to("new")
    for file, other in (("old", "old"), ("link", "old"), ("new", "./new"), ("dangling", "new")):
        with pytest.raises(InputError, match="--html and --json are the same file, " + file):
            check_output("--html", Path(file), {"--prompts": None, "--json": Path(other)})
    check_output("--html", Path("new"), {"--prompts": None, "--json": Path("old")})
    check_output("--html", Path("/dev/null"), {"--json": Path("/dev/null")})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("bench --method none --model absent --prompts FILE --output FILE", "--output --prompts"),
        ("report FOLDER --output FILE", "--output the file FILE of DIR"),
        ("trace FILE --html FILE", "--html TRACE.json"),
        ("trace FILE --json FILE", "--json TRACE.json"),
        ("trace --method rsd --model absent --html FILE --json FILE", "--html --json"),
        ("trace --method rsd --model absent --prompts FILE --json FILE", "--json --prompts"),
        ("tree FILE --fit 3 --output FILE", "--output RUN.json"),
        ("tree FILE --picture FILE", "--picture RUN.json"),
        ("tree FILE --fit 3 --output NEW --picture NEW", "--picture --output"),
        ("tree --tree FILE --picture FILE", "--picture --tree"),
    ],
)
def test_commands_do_not_overwrite_what_they_use(
    tmp_path: Path, arguments: str, names: str
) -> None:
    file = tmp_path / "run.json"
    shutil.copy(RUN, file)
    places = {"FILE": str(file), "FOLDER": str(tmp_path), "NEW": str(tmp_path / "new")}
    result = CliRunner().invoke(app, [places.get(each, each) for each in arguments.split()])
    assert result.exit_code == 2
    option, other = names.replace("FILE", file.name).split(maxsplit=1)
    assert f"{option} and {other} are the same file, /" in " ".join(result.output.split())
    assert file.read_bytes() == RUN.read_bytes()


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, only the first bytes of a file can be written."""

    def write_bytes(file: Path, data: bytes) -> int:
        with file.open("wb") as opened:
            opened.write(data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_a_failure_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.html"
    write_output(file, "before")
    with pytest.raises(UnicodeEncodeError):
        write_output(file, "\ud800")
    full_disk(monkeypatch)
    with pytest.raises(OSError, match=r"page\.html cannot be written: No space left on device"):
        write_output(file, "after")
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_file_stays_what_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    file.chmod(0o640)
    link.symlink_to(file)
    write_output(link, "ä")
    assert link.is_symlink()
    assert file.read_bytes() == "ä".encode()
    assert file.stat().st_mode & 0o777 == 0o640
    write_output(tmp_path / "new", b"\xff")
    assert (tmp_path / "new").read_bytes() == b"\xff"


def test_what_is_no_file_is_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, "text")
    assert os.read(reading, 100) == b"text"
    os.close(reading)
    assert pipe.is_fifo()
    # A pipe without a name, which /dev/stdout may lead to.
    reading, writing = os.pipe()
    write_output(Path(f"/dev/fd/{writing}"), "text")
    assert os.read(reading, 100) == b"text"
    os.close(reading)
    os.close(writing)


def test_a_file_is_written_where_no_other_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("a longer text")
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    monkeypatch.setattr(Path, "replace", None)
    write_output(file, "text")
    assert file.read_text() == "text"


def test_the_runs_before_one_that_cannot_be_written_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run(settings: Any, observer: object) -> dict[str, Any]:
        asked.append(settings.method.options)
        if len(asked) == 2:
            full_disk(monkeypatch)
        return {"options": settings.method.options}

    monkeypatch.setattr(sys.modules["drafttree.cli.bench"], "run", run)
    output = tmp_path / "runs.json"
    command = ["bench", "--method", "token-recycling", "--model", "absent"]
    command += ["--output", str(output), "--vary", "nodes=3", "--vary", "nodes=4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "cannot be written: No space left on device" in " ".join(result.output.split())
    assert json.loads(output.read_text()) == {"runs": [{"options": asked[0]}]}
    assert len(asked) == 2


@pytest.mark.parametrize("options", [["--fit", "1", "--output"], ["--picture"]])
def test_a_tree_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    run, before = tmp_path / "run.json", tmp_path / "before.png"
    acceptance = {"paths": [[0]], "tried": [2], "hit": [1]}
    run.write_text(
        json.dumps(
            {"engine": "a", "method": "b", "counters": {"steps": 2}, "acceptance": acceptance}
        )
    )
    before.write_text("before")
    full_disk(monkeypatch)
    result = CliRunner().invoke(app, ["tree", str(run), *options, str(before)])
    assert result.exit_code == 1
    assert "before.png cannot be written" in " ".join(result.output.split())
    assert before.read_text() == "before"
