"""Breaks the time of a decode step into parts: the target's forward, drafting, verification,
learning, grammars, KV moves, and the rest of the engine.

    .venv-vllm/bin/python scripts/benchmarks/bench_step.py MODEL --engine vllm --output step.json

Run it in the engine's environment. Each run adds one setting to the file; `--nodes none` is the
engine without speculation. The time of a part excludes the parts nested in it. On CUDA the device
is synchronised before and after every part, so that its work is attributed to the part that
launched it; the sum of the parts is then longer than an undisturbed step.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from drafttree.bench.chat import Chat
from drafttree.bench.machine import model_name, processor_name
from drafttree.bench.prompts import default_prompts_path, load_prompts
from drafttree.bench.protocol import EngineSpec, Request

PARTS = ("forward", "draft", "verify", "learn", "move", "grammar", "prepare", "engine")
"""Parts in the order of the paper's figure 4, then grammars, and the rest of the engine."""


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class StepClock:
    """Measures the seconds of each part of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] | None = None
        self._inside: list[float] = []

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Attribute the time of every call of a method of `owner` to a part of the current step."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._part(part):
                return method(*args, **kwargs)

        setattr(owner, name, call)

    def watch_steps(self, owner: Any, name: str) -> None:
        """Count every call of a method of `owner` as a step; time outside all parts is `engine`."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._now = defaultdict(float)
            with self._part("engine"):
                result = method(*args, **kwargs)
            self.steps.append(self._now)
            self._now = None
            return result

        setattr(owner, name, call)

    @contextmanager
    def _part(self, part: str) -> Iterator[None]:
        if self._now is None:
            yield
            return
        self._inside.append(0.0)
        _wait()
        started = perf_counter()
        try:
            yield
        finally:
            _wait()
            took = perf_counter() - started
            self._now[part] += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took


def watch_vllm(engine: Any, clock: StepClock) -> None:
    """Watch the parts of vLLM's steps; the engine must run in this process."""
    core = engine._llm.llm_engine
    runner = core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    clock.watch_steps(core, "step")
    for name, part in (
        ("_model_forward", "forward"),
        ("_prepare_inputs", "prepare"),
        ("_build_attention_metadata", "prepare"),
        ("_propose", "draft"),
        ("_verify", "verify"),
        ("_move_kv", "move"),
    ):
        if hasattr(runner, name):
            clock.watch(runner, name, part)
    clock.watch(runner.model, "compute_logits", "forward")
    if hasattr(runner, "_drafter"):
        clock.watch(runner._drafter, "observe", "learn")
        clock.watch(runner._drafter, "on_verified", "learn")
    grammars = core.engine_core.engine_core.scheduler.structured_output_manager
    for name in ("validate_tokens", "grammar_bitmask", "accept_tokens"):
        clock.watch(grammars, name, "grammar")


def watch_sglang(engine: Any, clock: StepClock) -> None:
    """Watch the parts of SGLang's steps."""
    scheduler = engine._scheduler
    clock.watch_steps(engine, "_step")
    clock.watch(scheduler.tp_worker, "forward_batch_generation", "forward")
    worker = scheduler.draft_worker
    if worker is not None:
        from drafttree.sglang import worker as steps

        clock.watch(steps, "prepare_verify", "prepare")
        for name, part in (("_draft", "draft"), ("_verify", "verify"), ("_move_kv", "move")):
            clock.watch(worker, name, part)
        clock.watch(worker.drafter, "observe", "learn")
        clock.watch(worker.drafter, "on_verified", "learn")


def make(engine: str, spec: EngineSpec) -> Any:
    """Start an engine of the bench in this process."""
    if engine == "vllm":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from drafttree.bench.vllm_engine import VllmEngine

        return VllmEngine(spec)
    if not torch.cuda.is_available():
        cores = sorted(os.sched_getaffinity(0))
        os.environ |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }
    from drafttree.bench.sglang_engine import SglangEngine

    return SglangEngine(spec)


def measured(
    name: str, engine: str, spec: EngineSpec, batches: list[list[Request]]
) -> dict[str, Any]:
    """Measure a setting: median times of decode steps and their parts, in milliseconds."""
    made = make(engine, spec)
    made.generate(batches[0])
    clock = StepClock()
    (watch_vllm if engine == "vllm" else watch_sglang)(made, clock)
    steps, answers = [], []
    for requests in batches:
        clock.steps.clear()
        answered = made.generate(requests)
        # The steps of the prefills come first.
        ran = [step for step in clock.steps if step["forward"]]
        steps += ran[len(ran) - max(answer.steps for answer in answered) :]
        answers += answered
    whole = median(sum(step.values()) for step in steps)
    return {
        "setting": name,
        "version": made.info.version,
        "steps": len(steps),
        "tokens_a_step": sum(a.step_tokens for a in answers) / sum(a.steps for a in answers),
        "step": 1000 * whole,
        **{part: 1000 * median(step.get(part, 0.0) for step in steps) for part in PARTS},
    }


def main(
    model: Path,
    output: Annotated[Path, typer.Option(help="JSON file, to which the setting is added.")],
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    nodes: Annotated[
        str, typer.Option(help="Draft tokens of Token Recycling; none is plain decoding.")
    ] = "80",
    batch: Annotated[int, typer.Option(help="Prompts answered together.")] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts in Spec-Bench's format; by default the shipped ones."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Number of prompts; if not given, one batch of them.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    dtype: str = "float32",
    eager: bool = False,
) -> None:
    """Measure one setting and show all settings in the file."""
    options: dict[str, Any] | None = None
    if nodes != "none":
        options = {"method": "token_recycling", "prime": False}
        options["nodes"] = nodes if nodes == "auto" else int(nodes)
    spec = EngineSpec(
        str(model), dtype=dtype, eager=eager, batch_size=batch, speculative_config=options
    )
    chat = Chat(model)
    loaded = load_prompts(prompts or default_prompts_path())
    requests = [
        Request(chat.render([prompt.turns[0]], []), tokens, schema=prompt.schema)
        for prompt in islice(cycle(loaded), limit or batch)
    ]
    batches = [requests[first : first + batch] for first in range(0, len(requests), batch)]
    done = json.loads(output.read_text()) if output.exists() else []
    row = measured(f"{engine}, {nodes} nodes", engine, spec, batches)
    done.append(
        {
            **row,
            "batch": batch,
            "model": model_name(model),
            "dtype": dtype,
            "eager": eager,
            "cores": len(os.sched_getaffinity(0)),
            "device": torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else processor_name(),
            "torch": torch.__version__,
        }
    )
    output.write_text(json.dumps(done, indent=1) + "\n")
    table = Table(title="Medians of decode steps, ms")
    for column in ("setting", "batch", "step", *PARTS):
        table.add_column(column)
    for each in done:
        figures = (f"{each[part]:.2f}" for part in ("step", *PARTS))
        table.add_row(each["setting"], str(each["batch"]), *figures)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
