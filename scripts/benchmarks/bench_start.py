"""Measure how long vLLM takes to its first token, and its memory, with a method and without.

    python -m scripts.benchmarks.bench_start MODEL --output start.json --dtype bfloat16

Each run is a process of its own: seconds from its start to the first token, and the memory of all
its processes then (proportional set size, which counts shared pages once). Both sides take turns.
Whether a cache is warm matters: vLLM keeps compiled code, and Token Recycling its primed rows.
`--empty-cache` gives each run an empty cache of drafttree's own. `--eager` starts without
compilation, whose time differs between starts by more than a method takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import time
from typing import Annotated, Any

import typer

from drafttree.bench.machine import processor_name
from scripts.experiments.common import heading, row

MIB = 1 << 20

RUN_ONCE = "import sys; from scripts.benchmarks.bench_start import once; once(*sys.argv[1:])"


def once(model: str, dtype: str, started: str, speculative: str, eager: str, output: str) -> None:
    """Start one engine in this process, and write when its first token came and its memory."""
    import psutil
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype=dtype,
        max_model_len=2048,
        speculative_config=json.loads(speculative),
        enforce_eager=json.loads(eager),
    )
    engine.generate("The", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    seconds = time() - float(started)
    process = psutil.Process()
    everything = [process, *process.children(recursive=True)]
    memory = sum(each.memory_full_info().pss for each in everything)
    Path(output).write_text(json.dumps({"seconds": seconds, "mib": memory / MIB}))


def run(
    model: Path, dtype: str, config: dict[str, Any] | None, eager: bool, empty_cache: bool
) -> Any:
    """The figures of a run in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ({"DRAFTTREE_CACHE": folder} if empty_cache else {})
        output = Path(folder) / "figures.json"
        arguments = [
            *(str(model), dtype, str(time())),
            *(json.dumps(config), json.dumps(eager), str(output)),
        ]
        # The engine's own output goes to standard error.
        subprocess.run(
            [sys.executable, "-c", RUN_ONCE, *arguments],
            env=environment,
            stdout=sys.stderr,
            check=True,
        )
        return json.loads(output.read_text())


def main(
    model: Path,
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    dtype: Annotated[str, typer.Option(help="The number format.")] = "bfloat16",
    method: Annotated[str, typer.Option(help="The method's name in vLLM.")] = "token_recycling",
    repeat: Annotated[int, typer.Option(help="Runs of each side, in turns.")] = 3,
    eager: Annotated[bool, typer.Option("--eager", help="Start without compilation.")] = False,
    empty_cache: Annotated[
        bool, typer.Option("--empty-cache", help="Start without primed rows and compiled kernels.")
    ] = False,
) -> None:
    """Measure both sides."""
    sides: dict[str, dict[str, Any] | None] = {"plain": None, method: {"method": method}}
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, config in sides.items():
            found[name].append(run(model, dtype, config, eager, empty_cache))
    report = {
        "model": model.resolve().name,
        "dtype": dtype,
        "processor": processor_name(),
        "eager": eager,
        "empty_cache": empty_cache,
        "runs": found,
    }
    output.write_text(json.dumps(report, indent=2) + "\n")
    heading("engine", "seconds to the first token", "MiB")
    for name, runs in found.items():
        seconds = ", ".join(f"{each['seconds']:.1f}" for each in runs)
        memory = median(each["mib"] for each in runs)
        row(name, f"{median(each['seconds'] for each in runs):.1f} ({seconds})", f"{memory:.0f}")


if __name__ == "__main__":
    typer.run(main)
