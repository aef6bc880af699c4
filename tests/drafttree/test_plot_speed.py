"""The plot and the table of bench runs by batch size or temperature."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from scripts.benchmarks import plot_speed
from scripts.benchmarks.plot_speed import By, lines

RESULTS = Path(__file__).parents[2] / "results" / "vllm-cpu"
TREE = {"method": "rsd", "mbsu": 1.25, "draft_time_share": 0.25}
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": TREE | {"options": {"model": "/draft", "tree": "branch:1-1"}},
    "beam": TREE | {"options": {"model": "/draft", "tree": "beam:2x2"}},
    "engine": {
        "method": "draft-model",
        "options": {"model": "/draft", "num_speculative_tokens": 2},
    },
}


def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def command(*arguments: object) -> Result:
    app = Typer()
    app.command()(plot_speed.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three settings at three temperatures, written in an order of its own."""
    files = []
    recorded = report("bfloat16-auto-batch-1")
    for name, setting in SETTINGS.items():
        for temperature in (1.0, 0.0, 0.3):
            files.append(tmp_path / f"{name}-t{temperature:g}.json")
            files[-1].write_text(json.dumps(recorded | setting | {"temperature": temperature}))
    return files


def test_the_command_draws_and_tabulates_by_temperature(runs: list[Path], tmp_path: Path) -> None:
    plot = tmp_path / "speed.png"
    result = command(*runs, "--by", "temperature", "--plot", plot)
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    heads, _, *rows = result.stdout.splitlines()
    assert heads == (
        "| file | temperature | method | tokens per step | MBSU | forward of a tree / of one token "
        "| drafting | speedup | decode speedup | tokens per second | plain |"
    )
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[0] for row in cells] == [
        f"`{name}-t{temperature}.json`" for temperature in ("0", "0.3", "1") for name in SETTINGS
    ]
    recorded = report("bfloat16-auto-batch-1")
    each = ", ".join(f"{one['speedup']:.2f}" for one in recorded["repetitions"])
    speedup = f"{recorded['speedup']:.2f} ({each})"
    assert cells[4][1:] == [
        *("0.3", "rsd, tree beam:2x2", f"{recorded['mean_accepted_tokens']:.2f}", "1.25"),
        *(f"{recorded['verify_cost']:.2f}", "25%", speedup, cells[0][8]),
        *(f"{recorded[key]:.1f}" for key in ("tokens_per_second", "baseline_tokens_per_second")),
    ]
    assert cells[5][2] == "draft-model, num_speculative_tokens 2"
    assert cells[5][4] == cells[5][6] == ""


def test_lines_are_named_by_what_differs() -> None:
    sizes = [report(f"float32-auto-batch-{size}") for size in (8, 1, 32)]
    other = report("bfloat16-ngram-batch-1")
    found = lines([*sizes, other], By.batch_size)
    assert {name: [*line] for name, line in found.items()} == {
        "token-recycling, float32": [8, 1, 32],
        "ngram, bfloat16": [1],
    }
    assert [*lines(sizes, By.batch_size)] == ["token-recycling"]
    assert [*lines(sizes, By.temperature)] == [
        f"token-recycling, batch size {size}" for size in (8, 1, 32)
    ]
    other_machine = sizes[1] | {"engine": "sglang", "cpu": "another"}
    assert [*lines([sizes[0], other_machine], By.batch_size)] == [
        f"vLLM, token-recycling, {sizes[0]['cpu']}",
        "SGLang, token-recycling, another",
    ]
    with pytest.raises(ValueError, match="two runs of token-recycling have batch size 8"):
        lines([*sizes, sizes[0]], By.batch_size)


def test_the_examples_of_the_script_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(RESULTS.parents[1])
    text = (plot_speed.__doc__ or "").replace("\\\n", " ")
    examples = re.findall(
        r"python -m scripts\.benchmarks\.plot_speed (.+) --plot results/(\S+)", text
    )
    assert len(examples) == 2
    for arguments, name in examples:
        found = [sorted(Path.cwd().glob(each)) or [each] for each in arguments.split()]
        result = command(*chain(*found), "--plot", tmp_path / name)
        assert result.exit_code == 0, result.output
