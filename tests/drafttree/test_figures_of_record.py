"""The plan of the figures of record, how it is resumed, and its tables of recorded runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from drafttree.bench.errors import InputError
from drafttree.bench.methods import check_engine, resolve_method
from drafttree.cli import app
from scripts.benchmarks import figures_of_record
from scripts.benchmarks.record_plan import (
    CONCURRENCIES,
    ENGINES,
    METHODS,
    Cell,
    Settings,
    cells,
    take_settings,
)
from scripts.benchmarks.record_table import tables

RESULTS = Path(__file__).parents[2] / "results" / "vllm-cpu"
SETTINGS = Settings("model", "prompts.jsonl", 13, "bfloat16", 96, 3)

# Takes the place of an engine's Python: writes a recorded report, and notes each call.
STAND_IN = """#!{python} -S
import json, pathlib, sys
arguments = sys.argv[1:]
here = pathlib.Path(__file__).parent
if arguments[0] == "-c":  # the probe for arctic-inference
    sys.exit(1)
if arguments[2] == "model":
    print("/models/pinned")
    sys.exit()
given = dict(zip(arguments[3::2], arguments[4::2]))
with (here / "calls").open("a") as calls:
    calls.write(" ".join((given["--engine"], given["--method"], given["--batch-size"])) + "\\n")
output = pathlib.Path(given["--output"])
if (here / "fails").exists():
    output.write_text("{{")
    sys.exit(1)
report = json.loads(pathlib.Path({recorded!r}).read_text())
report |= {{"engine": given["--engine"], "method": given["--method"]}}
report |= {{"batch_size": int(given["--batch-size"])}}
output.write_text(json.dumps(report))
"""


def recorded(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return report


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """Environments of both engines, in which every run gives the same recorded report."""
    for engine in ENGINES:
        folder = tmp_path / f".venv-{engine}" / "bin"
        folder.mkdir(parents=True)
        file = str(RESULTS / "bfloat16-waves-batch-1.json")
        (folder / "python").write_text(STAND_IN.format(python=sys.executable, recorded=file))
        (folder / "python").chmod(0o755)
    return tmp_path


def calls(environments: Path, engine: str) -> list[str]:
    file = environments / f".venv-{engine}" / "bin" / "calls"
    return file.read_text().splitlines() if file.exists() else []


def command(environments: Path, *arguments: object) -> Result:
    given = [environments / "runs", "--environments", environments, *arguments]
    typer_app = figures_of_record.typer.Typer()
    typer_app.command()(figures_of_record.main)
    return CliRunner().invoke(typer_app, list(map(str, given)))


def test_every_engine_concurrency_and_method_is_planned_unless_the_bench_refuses_it() -> None:
    planned = list(cells(ENGINES, CONCURRENCIES, METHODS))
    assert len({cell.file for cell in planned}) == len(planned) == 3 * (3 + 1)
    for method in METHODS:
        assert Cell("vllm", 32, method) in planned
        try:
            check_engine("sglang", resolve_method(method, {}))
        except InputError:
            assert Cell("sglang", 1, method) not in planned
        else:
            assert Cell("sglang", 1, method) in planned


def test_the_command_line_of_a_cell_is_one_of_the_bench(tmp_path: Path) -> None:
    bench = get_command(app).commands["bench"]
    for settings in (SETTINGS, Settings("model", None, None, "float32", 64, 1)):
        given = settings.arguments(Cell("sglang", 8, "token-recycling"), tmp_path / "out.json")
        parsed = bench.make_context("bench", list(given)).params
        assert (parsed["engine"], parsed["method"]) == ("sglang", "token-recycling")
        assert (parsed["batch_size"], parsed["waves"]) == (8, 2)
        assert (parsed["limit"], parsed["repeat"]) == (settings.limit, settings.repeat)
        assert parsed["prompts"] == (settings.prompts and Path(settings.prompts))
        assert parsed["max_new_tokens"] == settings.max_new_tokens
        assert parsed["dtype"] == settings.dtype


def test_a_folder_of_runs_is_continued_on_another_machine(tmp_path: Path) -> None:
    take_settings(tmp_path / "runs", replace(SETTINGS, model="/here/a", prompts="/here/b.jsonl"))
    take_settings(tmp_path / "runs", replace(SETTINGS, model="/there/a", prompts="/there/b.jsonl"))
    with pytest.raises(ValueError, match="holds runs with --model a, not c: give another folder"):
        take_settings(tmp_path / "runs", replace(SETTINGS, model="/here/c", prompts="b.jsonl"))


def test_runs_that_are_there_are_kept_and_what_is_missing_is_named(environments: Path) -> None:
    arguments = ("--concurrency", 1, "--concurrency", 8)
    first = command(environments, *arguments)
    assert first.exit_code == 1
    assert "vllm-suffix-batch-8: left out: arctic-inference is not installed" in first.stderr
    made = [f"vllm {method} {size}" for size in (1, 8) for method in ("ngram", "token-recycling")]
    assert calls(environments, "vllm") == made
    assert calls(environments, "sglang") == [f"sglang token-recycling {size}" for size in (1, 8)]
    (environments / "runs" / "vllm-ngram-batch-8.json").unlink()
    again = command(environments, *arguments)
    assert "vllm-ngram-batch-1: already measured" in again.stderr
    assert calls(environments, "vllm") == [*made, "vllm ngram 8"]
    assert again.stdout == first.stdout
    assert first.stdout.count("Requests at a time: 8") == 2
    table = command(environments, *arguments, "--only-table")
    assert (table.exit_code, table.stdout) == (0, first.stdout)


def test_a_run_that_fails_leaves_nothing_and_is_run_again(environments: Path) -> None:
    arguments = ("--engine", "sglang", "--concurrency", 32)
    fails = environments / ".venv-sglang" / "bin" / "fails"
    fails.touch()
    failed = command(environments, *arguments)
    assert failed.exit_code == 1
    assert "left out: drafttree bench ended with 1" in failed.stderr
    assert [file.name for file in (environments / "runs").iterdir()] == ["settings.json"]
    fails.unlink()
    assert command(environments, *arguments).exit_code == 0
    assert len(calls(environments, "sglang")) == 2


def test_other_settings_need_another_folder(environments: Path) -> None:
    arguments = ("--engine", "sglang", "--concurrency", 1)
    assert command(environments, *arguments).exit_code == 0
    other = command(environments, *arguments, "--repeat", 5)
    assert other.exit_code == 2
    assert "holds runs with --repeat 3, not 5: give another folder" in other.stderr
    assert len(calls(environments, "sglang")) == 1


def test_an_engine_that_is_not_installed_is_left_out(environments: Path) -> None:
    (environments / ".venv-vllm" / "bin" / "python").unlink()
    result = command(environments, "--concurrency", 1)
    assert result.exit_code == 1
    assert "make environment ENGINE=vllm" in result.stderr
    assert calls(environments, "sglang") == ["sglang token-recycling 1"]
    assert command(environments, "--engine", "vllm").exit_code == 2


def test_the_table_of_recorded_runs() -> None:
    """Recorded before waves had figures by kind of task: these cells are empty."""
    runs = [recorded("bfloat16-suffix-waves-batch-1"), recorded("bfloat16-waves-batch-1")]
    text = tables(runs)
    assert text.startswith("vLLM 0.32.0, smollm2-135m-a218bbb38e, bfloat16, compiled, cpu: AMD ")
    assert "at most 96 tokens a turn, repetitions: 3." in text
    heads = ("suffix", "Token Recycling", "suffix, second wave", "Token Recycling, second wave")
    assert f"| kind of task | plain, tokens/s | {' | '.join(heads)} |" in text
    assert "| all | 48.1 | 1.52 | **1.66** | 3.38 | **6.88** |" in text
    assert "| math reasoning |  |  |  |  |  |" in text
    # As newer reports have them.
    kinds = {"coding": {"speedup": 2.0, "baseline_tokens_per_second": 50.0}}
    for run in runs:
        for wave in run["waves"]:
            wave["per_category"] = kinds
    runs[0]["waves"][1]["per_category"] = {"coding": {"speedup": 2.5}}
    assert "| coding | 50.0 | **2.00** | **2.00** | **2.50** | 2.00 |" in tables(runs)
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert columns == {7}


def test_a_run_without_waves_counts_as_the_first_and_conditions_are_kept_apart() -> None:
    runs = [recorded(f"float32-auto-batch-{size}") for size in (1, 8)]
    runs.append(recorded("float32-ngram-batch-1"))
    text = tables(runs)
    assert "Requests at a time: 1\n" in text
    assert "Requests at a time: 8\n" in text
    assert "| kind of task | plain, tokens/s | Token Recycling | n-gram |" in text
    extraction = next(line for line in text.splitlines() if line.startswith("| extraction"))
    assert "**3.19** | 2.82 |" in extraction
    with pytest.raises(ValueError, match="two runs of token-recycling with 8 at a time"):
        tables([*runs, runs[1]])


def test_a_method_on_another_runner_than_plain_decoding_is_marked() -> None:
    runs = [recorded("bfloat16-suffix-waves-batch-1"), recorded("bfloat16-waves-batch-1")]
    for run in runs:
        run["runner"] = "v2"
    runs[0]["method_runner"] = "v1"
    text = tables(runs)
    assert "model runner V2" in text
    assert "| kind of task | plain, tokens/s | suffix (V1) | Token Recycling |" in text
