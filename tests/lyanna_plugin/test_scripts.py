"""Parts of the scripts that measure Lyanna which need no engine and no target."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from scripts.experiments.lyanna import measure_lyanna


def test_an_unknown_setting_is_an_error() -> None:
    app = typer.Typer()
    app.command()(measure_lyanna.main)
    places = ("--prompts", "p.jsonl", "--output", "o.json", "--work", "w", "--drafter", "a=a")
    chosen = ("--only", "12 nodes", "--only", "13 nodes")
    result = CliRunner().invoke(app, ["target", *places, *chosen], env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert "--only '13 nodes' is not one of: 4 nodes, 6 nodes" in result.output
