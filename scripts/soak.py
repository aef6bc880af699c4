"""Soaks an engine with draft trees: random mixtures of requests, compared with plain decoding.

    .venv-vllm/bin/python scripts/soak.py --engine vllm --minutes 60
    .venv-sglang/bin/python scripts/soak.py --engine sglang --minutes 60

An engine without speculation first answers a pool of random requests; then an engine with the
method serves mixtures of them until the time is over. Both have a tiny random model in float32.
Answers that the method promises to be plain decoding's are compared token for token: greedy ones,
and in vLLM seeded ones, except RSD's. The others must have the form, the length and the end that
were asked for. Memory, open files, processes, shared memory, KV slots and drafttree's own objects
are counted after a warm-up of at least 75 seconds and at the end; a shorter soak does not compare
them. The exit status is 1 if an answer is wrong, something leaks, the engine stops, or no draft
was accepted. If the engine stops, the mixture under way is printed; its messages are in `--logs`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
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
from soak_run import MEMORY_GROWTH, WARM_UP_SECONDS, Report
from structured_answers import make_drafter, make_model
from vllm_runs import ENVIRONMENT

START_SECONDS = 600.0
"""Time that an engine may take to start and to end, or to answer the pool."""

RECYCLING: dict[str, Any] = {"nodes": 24, "prime": False, "memory": 1 << 14}
"""Token Recycling's options. The memory is so small that it is full soon."""

COUNTS = ["draft_tokens", "accepted_tokens", "non_first_child_accepted"]
"""Counters that must not be 0."""


def run(engine: str, function: Any, arguments: tuple[Any, ...], seconds: float, log: Path) -> Any:
    """Call a function in a process that has imported the engine, whose messages go to a file."""
    variables = ENVIRONMENT if engine == "vllm" else environment() | {soak_held.VARIABLE: "1"}
    try:
        made, messages = run_job(engine, function, arguments, variables, seconds)
    except RunFailed as error:
        log.write_text(error.output)
        raise
    log.write_text(messages)
    return made


def under_way(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The mixture that was being served when an engine stopped; None if it was none.

    Args:
        lines: The lines of the record that `soak_run.soak` writes.
    """
    return lines[-1] if lines and "requests" in lines[-1] else None


def more_left(drafted: Counter[str], plain: Counter[str]) -> list[str]:
    """What the engine with draft trees has left more of in shared memory than plain decoding."""
    return [
        f"in shared memory are left {count} {purpose}, by plain decoding {plain[purpose]}"
        for purpose, count in sorted(drafted.items())
        if count > plain[purpose]
    ]


def main(
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="The engine.")],
    minutes: Annotated[float, typer.Option(help="How long to serve with draft trees.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the requests and mixtures.")] = 0,
    method: Annotated[
        Literal["token-recycling", "rsd", "lyanna"], typer.Option(help="The method.")
    ] = "token-recycling",
    pool: Annotated[int, typer.Option(help="Number of different requests.")] = 120,
    logs: Annotated[Path, typer.Option(help="Folder of the engines' messages.")] = Path("logs"),
) -> None:
    """Soak an engine; the last line counts requests, wrong answers and leaks."""
    with tempfile.TemporaryDirectory() as folder:
        answered, wrong, leaks, drafted = _soak(
            Path(folder), logs, engine, minutes, seed, method, pool
        )
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
    folder: Path, logs: Path, engine: str, minutes: float, seed: int, method: str, size: int
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
    logs.mkdir(parents=True, exist_ok=True)
    expected, used = run(engine, *plainly, START_SECONDS, logs / f"{engine}-plain.log")
    # SGLang itself leaves some files there.
    left_by_plain = soak_held.left_by(used)
    typer.echo(f"plain decoding has answered {len(expected)} requests")
    function, given = served
    work = (*given, pool, expected, record, seed, seconds)
    log = logs / f"{engine}-{method}.log"
    stopped, report = "", Report()
    try:
        report = run(engine, function, work, limit, log)
    except RunFailed as error:
        stopped = f"the engine stopped: {error}\nall of its messages are in {log}"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    if stopped and (mixture := under_way(lines)):
        stopped += f"\nit was serving {json.dumps(mixture)}"
    lines = [line for line in lines if "answered" in line]
    wrong = [
        f"mixture {line['mixture']}: {each['why']}: {json.dumps(each)}"
        for line in lines
        for each in line["wrong"]
    ]
    if stopped:
        wrong.append(stopped)
    else:
        _describe(report)
    leaks = report.leaks + more_left(soak_held.left_by(report.shared_memory), left_by_plain)
    drafted = all(report.counts.get(name, 0) > 0 for name in COUNTS)
    if not drafted and not stopped:
        wrong.append("no draft was accepted")
    return sum(line["answered"] for line in lines), wrong, leaks, drafted


def _describe(report: Report) -> None:
    for name, count in (report.counts | report.operations).items():
        typer.echo(f"{name}: {count}")
    names = ["after the warm-up", "at the end", "after the engine was closed"]
    for name, measured in zip(names, report.measured, strict=False):
        described = ", ".join(f"{key} {value}" for key, value in measured.items())
        typer.echo(f"{name}: {described}")
    if report.measured:
        typer.echo(f"memory is in KiB, and may grow by {MEMORY_GROWTH} after the warm-up")
    else:
        typer.echo(f"memory and state are not compared in less than {WARM_UP_SECONDS:.0f} seconds")


if __name__ == "__main__":
    typer.run(main)
