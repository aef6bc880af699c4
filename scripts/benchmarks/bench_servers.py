"""Measure an engine's servers under load, with and without speculation, in turns.

    python -m scripts.benchmarks.bench_servers MODEL servers.json \
        --method ngram --method suffix --method token-recycling \
        --users 1 --users 8 --users 32
    python -m scripts.benchmarks.bench_servers MODEL servers.json --engine sglang
    python -m scripts.benchmarks.bench_servers MODEL servers.json --only-table

A server of plain decoding and one for each method are started, and stay up. In each round every one
of them answers the same prompts, in an order that changes, in a closed loop: a fixed number of
requests is under way, and each that ends makes room for the next. No prompt comes twice, so that no
method can copy an earlier answer to the same prompt. The servers of a round follow one another
within minutes, so that what disturbs the machine for longer disturbs all alike.

Measured are the tokens per second of all requests, the time to the first token (TTFT), the mean
time of a request's tokens after the first one (TPOT), and the time to the last token. Tables go to
standard output, and everything else to standard error.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from drafttree.bench.engine_process import TITLES, check_name
from drafttree.bench.errors import InputError
from drafttree.bench.machine import model_name, processor_name
from drafttree.bench.methods import check_engine, resolve_method
from drafttree.bench.prompts import default_prompts_path, load_prompts
from scripts.benchmarks.load_servers import SERVED, ServedTarget
from scripts.benchmarks.record_table import METHOD_NAMES
from scripts.benchmarks.server_load import LoadFigures, Round, run_round

_WARM_UP = "Say hello."
_HEADS = (
    "",
    "tokens/s",
    "against plain",
    "TTFT, median",
    "TPOT, mean",
    "TPOT, median",
    "TPOT, p99",
    "latency, mean",
)


def tables(report: dict[str, Any]) -> str:
    """What was measured, and the figures for each number of users."""
    lines = [
        f"{TITLES[report['engine']]} {report['engine_version']}, {report['model']}, "
        f"{report['dtype']}, {report['cpu']}, at most {report['tokens']} tokens an answer.",
    ]
    for load in report["loads"]:
        plain = load["methods"]["none"]
        lines += ["", f"Requests at a time: {load['users']}, {plain['requests']} in all", ""]
        lines += [f"| {' | '.join(_HEADS)} |", f"|{len(_HEADS) * '---|'}"]
        for method, figures in load["methods"].items():
            rate, of_tokens = figures["tokens_per_second"], figures["per_token"]
            cells = [
                "plain" if method == "none" else METHOD_NAMES.get(method, method),
                f"{rate:.1f}",
                f"{rate / plain['tokens_per_second']:.2f}",
                f"{figures['first_token']['median']:.2f} s",
                *(f"{1000 * of_tokens[name]:.1f} ms" for name in ("mean", "median", "p99")),
                f"{figures['latency']['mean']:.2f} s",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(
    model: Annotated[Path, typer.Argument(help="The target's folder.")],
    output: Annotated[Path, typer.Argument(help="The JSON file to write, or to read.")],
    only_table: Annotated[
        bool, typer.Option("--only-table", help="Measure nothing; write the tables.")
    ] = False,
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    method: Annotated[
        list[str] | None, typer.Option(help="As in `drafttree bench`. Default: token-recycling.")
    ] = None,
    users: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time. Default: 1, 8 and 32.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds for each number of users.")] = 3,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of a round for each user, twice as many for one.")
    ] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 96,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts; if not given, the package's.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="The engines' data type.")] = "bfloat16",
    logs: Annotated[Path, typer.Option(help="Folder of the servers' messages.")] = Path("logs"),
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After `--`: further arguments of the servers.")
    ] = None,
) -> None:
    """Measure the servers in turns, and print tables."""
    if only_table:
        typer.echo(tables(json.loads(output.read_text())), nl=False)
        return
    names = list(dict.fromkeys(["none", *(method or ["token-recycling"])]))
    loads = users or [1, 8, 32]
    try:
        check_name(engine)
        methods = [resolve_method(name, {}) for name in names]
        for each in methods:
            check_engine(engine, each)
        asked = [prompt.turns[0] for prompt in load_prompts(prompts or default_prompts_path())]
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    sizes = [each * requests * (2 if each == 1 else 1) for each in loads]
    if (needed := rounds * sum(sizes)) > len(asked):
        raise typer.BadParameter(
            f"--rounds {rounds} and --requests {requests} take {needed} prompts, and there are "
            f"{len(asked)}: take fewer, or a larger file with --prompts"
        )
    unused = iter(asked)
    report: dict[str, Any] = {
        "engine": engine,
        "model": model_name(model),
        "dtype": dtype,
        "cpu": processor_name(),
        "tokens": tokens,
        "rounds": rounds,
        "loads": [],
    }
    logs.mkdir(parents=True, exist_ok=True)
    target = ServedTarget(engine, model, dtype, max(loads), arguments or [])
    with ExitStack() as stack:
        addresses: dict[str, str] = {}
        for name, started in zip(names, methods, strict=True):
            typer.echo(f"starting {name}", err=True)
            try:
                up = target.serve(started, logs / f"{name}.log")
                addresses[name] = stack.enter_context(up)
            except RuntimeError as error:
                typer.echo(f"error: {name}: {error}", err=True)
                raise typer.Exit(1) from error
            run_round(addresses[name], SERVED, [_WARM_UP], 1, 8)
        report["engine_version"] = target.version(addresses["none"])
        for count, size in zip(loads, sizes, strict=True):
            done: dict[str, list[Round]] = {name: [] for name in names}
            for index in range(rounds):
                turn = [next(unused) for _ in range(size)]
                for name in random.Random(index).sample(names, len(names)):
                    done[name].append(run_round(addresses[name], SERVED, turn, count, tokens))
            figures = {name: LoadFigures.of(done[name]).as_json() for name in names}
            report["loads"].append({"users": count, "methods": figures})
            # Written after each load, so that an interrupted run keeps what was measured.
            output.write_text(json.dumps(report, indent=2) + "\n")
            typer.echo(f"measured with {count} at a time", err=True)
    typer.echo(tables(report), nl=False)


if __name__ == "__main__":
    typer.run(main)
