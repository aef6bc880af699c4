"""The scripts that measure Lyanna, as far as they need neither an engine nor a target."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_a_setting_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    app = typer.Typer()
    app.command()(importlib.import_module("measure_lyanna").main)
    places = ("--prompts", "p.jsonl", "--output", "o.json", "--work", "w", "--drafter", "a=a")
    chosen = ("--only", "12 nodes", "--only", "13 nodes")
    result = CliRunner().invoke(app, ["target", *places, *chosen], env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert "--only '13 nodes' is not one of: 4 nodes, 6 nodes" in result.output
