"""`drafttree bench --method rsd`, the same in both engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_first_layers
from typer.testing import CliRunner

from drafttree.cli import app


def check_figures(engine: str, model: Path, folder: Path) -> None:
    """Run `drafttree bench` with the target's first ten layers as draft model, and check it."""
    draft = make_first_layers(model, folder, 10)
    prompts, output = folder / "prompts.jsonl", folder / "report.json"
    prompts.write_text('{"question_id": 1, "category": "qa", "turns": ["Count to ten."]}\n')
    arguments = [
        *("bench", "--engine", engine, "--method", "rsd", "--model", str(model)),
        *("--option", f"model={draft}", "--vary", "tree=beam:2x2", "--vary", "tree=branch:2-2"),
        *("--prompts", str(prompts)),
        *("--max-new-tokens", "12", "--eager", "--output", str(output)),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    runs = json.loads(output.read_text())["runs"]
    for report, tree, nodes in zip(runs, ("beam:2x2", "branch:2-2"), (4, 6), strict=True):
        assert tree in result.output
        assert report["options"]["tree"] == tree
        # The last tree is truncated to what the request may still emit.
        steps = report["counters"]["drafted_steps"]
        assert nodes * (steps - 1) < report["counters"]["draft_tokens"] <= nodes * steps
        assert report["identical"] + report["ties"] == 1
        assert report["block_efficiency"] == report["mean_accepted_tokens"]
        ratio = report["draft_size_ratio"]
        assert 0.4 < ratio < 0.7
        assert report["mbsu"] == pytest.approx(report["block_efficiency"] / (2 * ratio + 1))
        assert 0 < report["draft_time_share"] < 1
