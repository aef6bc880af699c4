"""Files that cannot be written are refused before a command does its work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drafttree.bench.errors import InputError
from drafttree.cli import app
from drafttree.cli.output_file import check_output


def test_a_file_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output("--json", tmp_path / "new.json")
    (tmp_path / "old.json").touch()
    check_output("--json", tmp_path / "old.json")
    monkeypatch.chdir(tmp_path)
    check_output("--json", Path("new.json"))


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"the folder of .* does not exist"):
        check_output("--json", tmp_path / "absent" / "new.json")
    with pytest.raises(InputError, match="is a folder: name a file for --json"):
        check_output("--json", tmp_path)
    (tmp_path / "old.json").touch()
    for refused, name in ((tmp_path, "new.json"), (tmp_path / "old.json", "old.json")):
        monkeypatch.setattr(os, "access", lambda place, mode, refused=refused: place != refused)
        with pytest.raises(InputError, match="cannot be written: name another file for --json"):
            check_output("--json", tmp_path / name)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["bench", "--method", "none", "--model", "absent"], "--output"),
        (["report", "."], "--output"),
        (["trace", "--method", "token-recycling", "--model", "absent"], "--json"),
        (["trace", "--method", "token-recycling", "--model", "absent"], "--html"),
    ],
)
def test_commands_look_at_their_files_first(
    tmp_path: Path, command: list[str], option: str
) -> None:
    result = CliRunner().invoke(app, [*command, option, str(tmp_path)])
    assert result.exit_code == 2
    assert f"is a folder: name a file for {option}" in " ".join(result.output.split())
