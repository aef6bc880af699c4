"""`drafttree bench` and `demo` with Lyanna, the same in both engines."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lyanna_parts import drafter_for
from typer.testing import CliRunner

from drafttree.cli import app
from lyanna_plugin.checkpoint import save


def check_figures(engine: str, model: Path, folder: Path) -> None:
    """Run `drafttree bench` with an untrained drafter, and check that its figures agree."""
    save(drafter_for(model), folder / "drafter")
    prompts, output = folder / "prompts.jsonl", folder / "report.json"
    prompts.write_text('{"question_id": 1, "category": "qa", "turns": ["Count to ten."]}\n')
    arguments = [
        *("bench", "--engine", engine, "--method", "lyanna", "--model", str(model)),
        *("--option", f"model={folder / 'drafter'}", "--option", "nodes=12"),
        *("--option", "head=whole"),
        *("--vary", "resample=false", "--vary", "resample=true", "--prompts", str(prompts)),
        *("--max-new-tokens", "12", "--eager", "--output", str(output)),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    one_tree, fused = json.loads(output.read_text())["runs"]
    for report in (one_tree, fused):
        assert report["identical"] + report["ties"] == 1
        assert 0 < report["draft_time_share"] < 1
        assert "mbsu" not in report
    # The last tree is truncated to what the request may still emit.
    counters = one_tree["counters"]
    steps = counters["drafted_steps"]
    assert 12 * (steps - 1) < counters["draft_tokens"] <= 12 * steps
    counters = fused["counters"]
    assert counters["draft_tokens"] > 12 * counters["drafted_steps"]


def check_demo(engine: str) -> None:
    """Run the demo with the shipped drafter: it gives the same answers in far fewer steps."""
    command = ["demo", "--engine", engine, "--method", "lyanna", "--nodes", "12"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    alike = re.search(r"(\d) of 6 answers are the same token for token(?: \((\d) differ)?", output)
    assert alike is not None
    assert int(alike[1]) + int(alike[2] or 0) == 6
    fewer = re.search(r"lyanna took (\d+)% fewer decode steps", output)
    assert fewer is not None
    assert int(fewer[1]) > 35
