"""Measure an engine's servers under load, with and without speculation, in turns.

    python -m scripts.benchmarks.bench_servers MODEL servers.json \
        --method ngram --method suffix --method token-recycling \
        --users 1 --users 8 --users 32
    python -m scripts.benchmarks.bench_servers MODEL servers.json --engine sglang
    python -m scripts.benchmarks.bench_servers MODEL servers.json --rate 0.5 --rate 2
    python -m scripts.benchmarks.bench_servers MODEL servers.json --method lyanna \
        --option lyanna.model=DRAFTER --option lyanna.nodes=auto
    python -m scripts.benchmarks.bench_servers MODEL servers.json --only-table

A server of plain decoding and one for each method are started, and stay up. In each round every one
of them answers the same prompts, in an order that changes. In a closed loop a fixed number of
requests is under way, and each that ends makes room for the next. In an open one requests arrive at
a rate, at the same random times for all servers, and latencies are what differs. No prompt comes
twice, so that no method can copy an earlier answer to the same prompt. The servers of a round
follow one another within minutes, so that what disturbs the machine for longer disturbs all alike.

Measured are the tokens per second of all requests, the time to the first token (TTFT), the mean
time of a request's tokens after the first one (TPOT), and the time to the last token. Tables go to
standard output, and everything else to standard error.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from drafttree.bench.engine_process import TITLES, check_name
from drafttree.bench.errors import InputError
from drafttree.bench.machine import model_name, processor_name, shown_options
from drafttree.bench.methods import BenchMethod, check_engine, resolve_variants
from drafttree.bench.prompts import default_prompts_path, load_prompts
from scripts.benchmarks.load_servers import SERVED, ServedTarget
from scripts.benchmarks.record_table import METHOD_NAMES
from scripts.benchmarks.server_load import Load, LoadFigures, Round, run_round

_WARM_UP = "Say hello."
_MOST_AT_A_RATE = 32
"""Requests that a server decodes at a time if they arrive at a rate."""

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
        title = "Requests at a time" if "users" in load else "Requests per second"
        size = load["users"] if "users" in load else f"{load['rate']:g}"
        lines += ["", f"{title}: {size}, {plain['requests']} in all", ""]
        lines += [f"| {' | '.join(_HEADS)} |", f"|{len(_HEADS) * '---|'}"]
        for method, figures in load["methods"].items():
            rate, of_tokens = figures["tokens_per_second"], figures["per_token"]
            cells = [
                "plain" if method == "none" else METHOD_NAMES.get(method, method),
                f"{rate:.1f}",
                f"{rate / plain['tokens_per_second']:.2f}" if "users" in load else "",
                f"{figures['first_token']['median']:.2f} s",
                *(f"{1000 * of_tokens[name]:.1f} ms" for name in ("mean", "median", "p99")),
                f"{figures['latency']['mean']:.2f} s",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def resolve_methods(names: Sequence[str], options: Iterable[str]) -> list[BenchMethod]:
    """The methods of these names, with hyphens, and their `METHOD.KEY=VALUE` options.

    Raises:
        InputError: There is no such method, or an option is wrong or for another one.
    """
    pairs: dict[str, list[str]] = {name: [] for name in names}
    for given in options:
        name, _, pair = given.partition(".")
        if name not in pairs:
            raise InputError(
                f"--option {given!r}: expected METHOD.KEY=VALUE with one of the methods that are "
                f"measured, {', '.join(names)}"
            )
        pairs[name].append(pair)
    return [resolve_variants(name, pairs[name], [])[0] for name in names]


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
    option: Annotated[
        list[str] | None, typer.Option(help="METHOD.KEY=VALUE, an option of one of the methods.")
    ] = None,
    users: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time. Default: 1, 8 and 32, without --rate."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Requests that arrive in a second. 32 are decoded at a time."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each load.")] = 3,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of a round for each user, twice as many for one.")
    ] = 3,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Seconds in which the requests of a round arrive at a rate."),
    ] = 20,
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
    closed = users or ([] if rate else [1, 8, 32])
    loads = [Load(users=count) for count in closed] + [Load(rate=each) for each in rate or []]
    try:
        check_name(engine)
        methods = resolve_methods(names, option or [])
        for each in methods:
            check_engine(engine, each)
        asked = [prompt.turns[0] for prompt in load_prompts(prompts or default_prompts_path())]
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    sizes = [each * requests * (2 if each == 1 else 1) for each in closed]
    sizes += [math.ceil(each * seconds) for each in rate or []]
    if (needed := rounds * sum(sizes)) > len(asked):
        raise typer.BadParameter(
            f"the loads take {needed} prompts in {rounds} rounds, and there are {len(asked)}: take "
            "fewer --rounds, --requests or --seconds, or a larger file with --prompts"
        )
    unused = iter(asked)
    most = max([*closed, _MOST_AT_A_RATE] if rate else closed)
    report: dict[str, Any] = {
        "engine": engine,
        "model": model_name(model),
        "dtype": dtype,
        "cpu": processor_name(),
        "tokens": tokens,
        "rounds": rounds,
        "most_running": most,
        "options": {each.name: shown_options(each.options) for each in methods if each.options},
        "loads": [],
    }
    logs.mkdir(parents=True, exist_ok=True)
    target = ServedTarget(engine, model, dtype, most, arguments or [])
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
            run_round(addresses[name], SERVED, [_WARM_UP], Load(users=1), 8)
        report["engine_version"] = target.version(addresses["none"])
        for load, size in zip(loads, sizes, strict=True):
            done: dict[str, list[Round]] = {name: [] for name in names}
            for index in range(rounds):
                turn = [next(unused) for _ in range(size)]
                for name in random.Random(index).sample(names, len(names)):
                    address = addresses[name]
                    done[name].append(run_round(address, SERVED, turn, load, tokens, index))
            figures = {name: LoadFigures.of(done[name]).as_json() for name in names}
            report["loads"].append({**load.as_json(), "methods": figures})
            # Written after each load, so that an interrupted run keeps what was measured.
            output.write_text(json.dumps(report, indent=2) + "\n")
            typer.echo(f"measured with {load}", err=True)
    typer.echo(tables(report), nl=False)


if __name__ == "__main__":
    typer.run(main)
