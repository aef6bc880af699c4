"""Shows what a GPU does in vLLM's decode steps, and for how long it does nothing.

    python scripts/gpu/profile_steps.py MODEL token-recycling
    python scripts/gpu/profile_steps.py MODEL none

The prompts are answered without the profiler, for the time of a step, and then with it. For a step
it prints how long the GPU was busy, the kernels that took most of that, and the host's calls of the
CUDA runtime, which show whether the host waits.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import parse_method
from rich.console import Console
from rich.table import Table

from drafttree.bench.chat import Chat
from drafttree.bench.prompts import default_prompts_path, load_prompts
from drafttree.bench.protocol import EngineSpec, Generation, Request
from drafttree.cli.bench import Dtype, Runner

Interval = tuple[float, float]
"""Start and end in microseconds."""


@dataclass(frozen=True)
class Spent:
    """What was spent on something: how often, and microseconds."""

    times: int
    microseconds: float


def busy(intervals: Iterable[Interval]) -> float:
    """Microseconds that are covered by at least one interval."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def by_name(events: Iterable[tuple[str, Interval]]) -> dict[str, Spent]:
    """What was spent on each name, the most first."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, (start, end) in events:
        found[name].append(end - start)
    sums = {name: Spent(len(each), sum(each)) for name, each in found.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].microseconds))


def table(title: str, spent: dict[str, Spent], steps: int, most: int) -> Table:
    """The greatest entries, for each step."""
    shown = Table("", "times", "µs", title=title)
    for name, each in list(spent.items())[:most]:
        shown.add_row(name[:90], f"{each.times / steps:.1f}", f"{each.microseconds / steps:.1f}")
    return shown


def events_of(profiled: Any, *, on_gpu: bool) -> list[tuple[str, Interval]]:
    """The profiler's events on the GPU, or the host's calls of the CUDA runtime."""
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in profiled.events()
        if event.device_type == kind and (on_gpu or event.name.startswith("cuda"))
    ]


def steps_of(generations: Sequence[Generation]) -> int:
    """Number of the engine's decode steps in which the requests were answered together."""
    return max(generation.steps for generation in generations)


def main(
    model: Annotated[str, typer.Argument(help="The model's folder.")],
    method: Annotated[str, typer.Argument(help="NAME or NAME,KEY=VALUE,...; none is plain.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="The engine's data type.")] = Dtype.bfloat16,
    runner: Annotated[Runner | None, typer.Option(help="vLLM's model runner.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Lines of each table.")] = 25,
) -> None:
    """Profile decode steps of one engine."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    from drafttree.bench.vllm_engine import VllmEngine

    chosen = parse_method(method)
    engine = VllmEngine(
        EngineSpec(
            model=model,
            dtype=dtype,
            batch_size=batch_size,
            speculative_config=chosen.speculative_config,
            runner=runner,
        )
    )
    chat = Chat(Path(model))
    prompts = load_prompts(default_prompts_path(), batch_size)
    requests = [Request(chat.render(prompt.turns[:1], []), max_new_tokens) for prompt in prompts]
    for _ in range(2):  # the first time teaches the drafter, and compiles what is left
        undisturbed = engine.generate(requests)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiled:
        answered = engine.generate(requests)
    steps, on_gpu = steps_of(answered), events_of(profiled, on_gpu=True)
    seconds = sum(generation.decode_seconds for generation in undisturbed)
    console = Console(width=120, highlight=False)
    console.print(
        f"{method}, {batch_size} at a time, runner {engine.info.runner}: "
        f"{1e3 * seconds / steps_of(undisturbed):.2f} ms a step without the profiler; with it "
        f"{steps} steps, in each of which the GPU was busy for "
        f"{busy(interval for _, interval in on_gpu) / steps / 1e3:.2f} ms in "
        f"{len(on_gpu) / steps:.0f} kernels and copies, prompts included"
    )
    console.print(table("on the GPU, for each step", by_name(on_gpu), steps, most))
    console.print(
        table("the host's calls", by_name(events_of(profiled, on_gpu=False)), steps, most)
    )


if __name__ == "__main__":
    typer.run(main)
