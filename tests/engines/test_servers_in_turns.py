"""`bench_servers` with the real servers of each engine; times are not checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from hosts import Host
from typer.testing import CliRunner

from scripts.benchmarks import bench_servers

APP = typer.Typer()
APP.command()(bench_servers.main)


@pytest.mark.full
def test_plain_decoding_and_token_recycling_answer_in_turns(
    host: Host, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    output = tmp_path / "servers.json"
    command = [str(smollm2), str(output), "--engine", host.name, "--logs", str(tmp_path)]
    run = CliRunner().invoke(
        APP,
        [
            *(*command, "--rounds", "2", "--tokens", "12", "--option", "token-recycling.nodes=7"),
            *("--users", "2", "--requests", "2", "--rate", "1.5", "--seconds", "2"),
        ],
    )
    assert run.exit_code == 0, run.output
    report = json.loads(output.read_text())
    assert report["engine_version"][0].isdigit()
    assert report["options"] == {"token-recycling": {"nodes": 7}}
    closed, opened = report["loads"]
    assert (closed["users"], opened["rate"]) == (2, 1.5)
    for load, requests in ((closed, 8), (opened, 6)):
        assert list(load["methods"]) == ["none", "token-recycling"]
        for figures in load["methods"].values():
            assert figures["requests"] == requests
            assert requests < figures["tokens"] <= requests * 12
            assert len(figures["by_round"]) == 2
    assert "| Token Recycling |" in run.output
