"""The figures of servers under load, and the tables of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scripts.benchmarks import bench_servers
from scripts.benchmarks.server_load import Load, LoadFigures, Reply, Round

APP = typer.Typer()
APP.command()(bench_servers.main)


def test_the_figures_of_rounds() -> None:
    rounds = [
        Round([Reply(5, 1.0, 3.0), Reply(11, 1.0, 2.0)], 4.0),
        Round([Reply(1, 2.0, 2.0)], 1.0),
    ]
    figures = LoadFigures.of(rounds)
    assert (figures.requests, figures.tokens) == (3, 17)
    assert figures.tokens_per_second == pytest.approx(17 / 5)
    assert figures.by_round == pytest.approx((4, 1))
    # 2 s for four tokens, 1 s for ten, and nothing after the first one.
    assert figures.per_token.mean == pytest.approx((0.5 + 0.1 + 0.0) / 3)
    assert figures.per_token.median == pytest.approx(0.1)
    assert figures.first_token.median == pytest.approx(1.0)
    assert figures.latency.mean == pytest.approx(7 / 3)
    assert figures.latency.p99 == pytest.approx(2.98)


def test_a_run_is_shown_against_plain_decoding(tmp_path: Path) -> None:
    fast = LoadFigures.of([Round([Reply(30, 0.25, 1.7)], 2.0)]).as_json()
    slow = LoadFigures.of([Round([Reply(30, 0.5, 3.4)], 4.0)]).as_json()
    report = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "model": "small",
        "dtype": "float32",
        "cpu": "two cores",
        "tokens": 30,
        "loads": [{"users": 8, "methods": {"none": slow, "token-recycling": fast}}],
    }
    file = tmp_path / "servers.json"
    file.write_text(json.dumps(report))
    run = CliRunner().invoke(APP, [str(tmp_path), str(file), "--only-table"])
    assert run.exit_code == 0, run.output
    assert run.output.startswith("vLLM 0.32.0, small, float32, two cores, at most 30 tokens")
    assert "Requests at a time: 8, 1 in all" in run.output
    plain, ours = run.output.splitlines()[-2:]
    assert plain.startswith("| plain | 7.5 | 1.00 | 0.50 s | 100.0 ms |")
    assert ours.startswith("| Token Recycling | 15.0 | 2.00 | 0.25 s | 50.0 ms |")


def test_requests_arrive_at_a_rate_or_are_there_from_the_beginning() -> None:
    assert Load(users=2).arrivals(3, seed=1) == [0, 0, 0]
    at_a_rate = Load(rate=4)
    arrivals = at_a_rate.arrivals(2000, seed=1)
    assert arrivals == sorted(arrivals) == at_a_rate.arrivals(2000, seed=1)
    assert arrivals != at_a_rate.arrivals(2000, seed=2)
    # Their mean is 500 s, with a standard deviation of 11 s.
    assert arrivals[-1] == pytest.approx(500, abs=45)


def test_a_load_at_a_rate_has_its_own_title(tmp_path: Path) -> None:
    figures = LoadFigures.of([Round([Reply(30, 0.25, 1.7)], 2.0)]).as_json()
    report = {
        "engine": "sglang",
        "engine_version": "0.5.23",
        "model": "small",
        "dtype": "float32",
        "cpu": "two cores",
        "tokens": 30,
        "loads": [{"rate": 0.5, "methods": {"none": figures}}],
    }
    assert "\nRequests per second: 0.5, 1 in all\n" in bench_servers.tables(report)


def test_options_are_for_one_method_each() -> None:
    names, options = ["none", "ngram", "token-recycling"], ["token-recycling.nodes=15"]
    plain, ngram, ours = bench_servers.resolve_methods(names, options)
    assert plain.options == ngram.options == {}
    assert ours.options == {"nodes": 15}
    assert ours.speculative_config == {"method": "token_recycling", "nodes": 15}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--option", "nodes=15"], "expected METHOD.KEY=VALUE with one of the methods"),
        (["--option", "lyanna.nodes=15"], "that are measured, none, token-recycling"),
        (["--option", "token-recycling.nodes=0"], "Token Recycling option nodes=0: use a number"),
        (["--rate", "2", "--seconds", "500"], "fewer --rounds, --requests or --seconds"),
        (["--rounds", "20"], "or a larger file with --prompts"),
        (["--engine", "sglang", "--method", "ngram"], "does not run in SGLang on a CPU"),
        (["--engine", "trtllm"], "unknown engine 'trtllm'; known here: vllm, sglang"),
        (["--method", "ngrams"], "besides none and vLLM's own ngram, suffix and draft-model"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_wrong_options_are_errors_before_anything_starts(
    tmp_path: Path, options: list[str], message: str
) -> None:
    output = tmp_path / "servers.json"
    run = CliRunner().invoke(APP, [str(tmp_path), str(output), *options])
    assert run.exit_code == 2
    assert message in " ".join(run.output.replace("│", "").split())
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start_is_named_with_its_messages(tmp_path: Path) -> None:
    output, logs = tmp_path / "servers.json", tmp_path / "logs"
    given = [str(tmp_path / "missing"), str(output), "--users", "1", "--rounds", "1"]
    run = CliRunner().invoke(APP, [*given, "--logs", str(logs)])
    assert run.exit_code == 1
    assert f"error: none: the server ended with 1; its messages: {logs / 'none.log'}" in run.output
    assert (logs / "none.log").stat().st_size > 0
    assert not output.exists()
