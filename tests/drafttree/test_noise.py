"""The processes that disturb a benchmark start, work, stop and do not outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from scripts.benchmarks import bench_under_noise
from scripts.benchmarks.noise import NOISES, Noise

ROOT = Path(__file__).resolve().parents[2]


def wait_until_set_up(process: psutil.Process) -> None:
    """Wait until a process has spent some time, which it does after it has set itself up."""
    while process.is_running() and sum(process.cpu_times()[:2]) < 0.2:
        sleep(0.05)


@pytest.mark.parametrize(
    ("name", "count"),
    [("quiet", 0), ("neighbour", 1), ("bursts", 4), ("low-priority", None)],
)
def test_every_noise_starts_and_stops(name: str, count: int | None) -> None:
    expected = len(os.sched_getaffinity(0)) if count is None else count
    with NOISES[name].processes() as processes:
        assert len(processes) == expected
        assert all(process.poll() is None for process in processes)
    assert all(process.returncode is not None for process in processes)


def test_a_busy_process_works_at_its_niceness_on_its_core() -> None:
    noise = Noise("always busy", 1, 1, 1, niceness=19, pinned=True)
    with noise.processes() as (process,):
        found = psutil.Process(process.pid)
        wait_until_set_up(found)
        assert found.nice() == 19
        assert found.cpu_affinity() == sorted(os.sched_getaffinity(0))[:1]


def test_processes_end_when_an_error_leaves_the_block() -> None:
    with pytest.raises(RuntimeError), NOISES["bursts"].processes() as processes:
        raise RuntimeError
    assert all(process.returncode is not None for process in processes)


def test_processes_end_with_a_benchmark_that_is_killed() -> None:
    program = (
        "from scripts.benchmarks.noise import NOISES\n"
        "with NOISES['low-priority'].processes() as processes:\n"
        "    print(*(process.pid for process in processes), flush=True)\n"
        "    input()\n"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert children
    for child in children:
        wait_until_set_up(child)
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_reports_are_written_for_each_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    figures = {
        **{"baseline_tokens_per_second": 10.0, "tokens_per_second": 15.0, "speedup": 1.5},
        **{"decode_speedup": 1.6, "repetitions": [{"speedup": 1.4}, {"speedup": 1.5}]},
    }
    given: list[list[str]] = []

    def bench(model: Path, arguments: list[str]) -> dict[str, Any]:
        given.append(arguments)
        return figures

    monkeypatch.setattr(bench_under_noise, "bench", bench)
    app, output = typer.Typer(), tmp_path / "noise.json"
    app.command()(bench_under_noise.main)
    asked = ["model", "--output", str(output), "--noise", "quiet", "--noise", "bursts"]
    result = CliRunner().invoke(app, [*asked, "--", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert [arguments[-2:] for arguments in given] == [["--dtype", "bfloat16"]] * 2
    assert output.read_text().count('"decode_speedup": 1.6') == 2
    assert "| 10.0 | 15.0 | 1.50 (1.40, 1.50) | 1.60 |" in result.output
    assert CliRunner().invoke(app, [*asked, "--noise", "storm"]).exit_code == 2
