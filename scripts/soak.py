"""Soaks an engine with draft trees: random mixtures of requests, compared with plain decoding.

    .venv-vllm/bin/python scripts/soak.py --engine vllm --minutes 60
    .venv-sglang/bin/python scripts/soak.py --engine sglang --minutes 60

An engine without speculation first answers a pool of random requests; then an engine with the
method serves mixtures of them until the time is over. Both have a tiny random model in float32.
Answers that the method promises to be plain decoding's are compared token for token: greedy ones,
and in vLLM seeded ones, except RSD's. The others must have the form, the length and the end that
were asked for. Memory, open files, processes, shared memory, KV slots and drafttree's own objects
are counted after a warm-up and at the end. The exit status is 1 if an answer is wrong, something
leaks, the engine stops, or no draft was accepted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

import soak_held
import soak_sglang
import soak_vllm
from engine_host.jobs import RunFailed, run_job
from sglang_runs import environment
from soak_requests import make_requests
from soak_run import MEMORY_GROWTH, Report
from structured_answers import make_drafter, make_model
from vllm_runs import ENVIRONMENT

START_SECONDS = 600.0
"""Time that an engine may take to start and to end, or to answer the pool."""

RECYCLING: dict[str, Any] = {"nodes": 24, "prime": False, "memory": 1 << 14}
"""Token Recycling's options. The memory is so small that it is full soon."""

COUNTS = ["draft_tokens", "accepted_tokens", "non_first_child_accepted"]
"""Counters that must not be 0."""


def run(engine: str, function: Any, arguments: tuple[Any, ...], seconds: float) -> Any:
    """Call a function in a process that has imported the engine."""
    variables = ENVIRONMENT if engine == "vllm" else environment() | {soak_held.VARIABLE: "1"}
    made, _ = run_job(engine, function, arguments, variables, seconds)
    return made


def main(
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="The engine.")],
    minutes: Annotated[float, typer.Option(help="How long to serve with draft trees.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the requests and mixtures.")] = 0,
    method: Annotated[
        Literal["token-recycling", "rsd", "lyanna"], typer.Option(help="The method.")
    ] = "token-recycling",
    pool: Annotated[int, typer.Option(help="Number of different requests.")] = 120,
) -> None:
    """Soak an engine; the last line counts requests, wrong answers and leaks."""
    with tempfile.TemporaryDirectory() as folder:
        answered, wrong, leaks, drafted = _soak(Path(folder), engine, minutes, seed, method, pool)
    for each in wrong:
        typer.echo(
            f"wrong, with --engine {engine} --method {method} --seed {seed} --pool {pool}: {each}"
        )
    for each in leaks:
        typer.echo(f"leak: {each}")
    typer.echo(f"{answered} requests, {len(wrong)} wrong, {len(leaks)} leaks")
    if wrong or leaks or not drafted:
        raise typer.Exit(1)


def _soak(
    folder: Path, engine: str, minutes: float, seed: int, method: str, size: int
) -> tuple[int, list[str], list[str], bool]:
    model = make_model(folder / "model")
    draft_model, options = None, RECYCLING
    if method != "token-recycling":
        draft_model, options = make_drafter(method, model, folder)
    pool = make_requests(engine, seed, size, method)
    record = folder / "record.jsonl"
    record.touch()
    seconds = minutes * 60
    limit = seconds + START_SECONDS
    if engine == "vllm":
        speculative = {"method": method.replace("-", "_"), **options}
        if draft_model is not None:
            speculative["model"] = str(draft_model)
        plainly = soak_vllm.answer_plainly, (model, pool)
        served = soak_vllm.soak, (model, speculative)
    else:
        arguments = {"speculative_algorithm": method}
        if draft_model is not None:
            arguments["speculative_draft_model_path"] = str(draft_model)
        plainly = soak_sglang.answer_plainly, (model, pool)
        served = soak_sglang.soak, (model, arguments, options)
    before = soak_held.shared_memory()
    expected = run(engine, *plainly, START_SECONDS)
    left_by_plain = soak_held.unowned(soak_held.shared_memory() - before)
    typer.echo(f"plain decoding has answered {len(expected)} requests")
    function, given = served
    stopped, report = [], Report()
    try:
        report = run(engine, function, (*given, pool, expected, record, seed, seconds), limit)
    except RunFailed as error:
        stopped = [f"the engine stopped: {error}"]
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    wrong = [
        f"mixture {line['mixture']}: {each['why']}: {json.dumps(each)}"
        for line in lines
        for each in line["wrong"]
    ]
    _describe(report)
    leaks = list(report.leaks)
    # SGLang itself leaves some files there, and so may other programs of the machine.
    if len(left := soak_held.unowned(report.shared_memory)) > len(left_by_plain):
        leaks.append(f"in shared memory are left {sorted(left)}, by plain decoding {left_by_plain}")
    drafted = all(report.counts.get(name, 0) > 0 for name in COUNTS)
    if not drafted and not stopped:
        wrong.append("no draft was accepted")
    return sum(line["answered"] for line in lines), wrong + stopped, leaks, drafted


def _describe(report: Report) -> None:
    for name, count in (report.counts | report.operations).items():
        typer.echo(f"{name}: {count}")
    names = ["after the warm-up", "at the end", "after the engine was closed"]
    for name, measured in zip(names, report.measured, strict=False):
        described = ", ".join(f"{key} {value}" for key, value in measured.items())
        typer.echo(f"{name}: {described}")
    typer.echo(f"memory is in KiB, and may grow by {MEMORY_GROWTH} after the warm-up")


if __name__ == "__main__":
    typer.run(main)
