"""Time what a tree method itself adds to a decode step in SGLang: drafting, masks, acceptance,
what is learnt, and the KV moves, without the target's forward. Run it in SGLang's environment:

    .venv-sglang/bin/python scripts/time_own_work.py MODEL [--nodes 80]
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer


def timed(owner: Any, name: str, seconds: list[float]) -> None:
    """Have every call of a method of `owner` timed from now on."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(perf_counter() - started)

    setattr(owner, name, call)


def main(
    model: Path, nodes: int = 80, tokens: Annotated[int, typer.Option(help="To decode.")] = 200
) -> None:
    """Decode one prompt and print the median of its steps."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    import torch
    from transformers import AutoTokenizer

    from drafttree.bench.protocol import EngineSpec, Request
    from drafttree.bench.sglang_engine import SglangEngine

    options = {"method": "token_recycling", "nodes": nodes}
    engine = SglangEngine(EngineSpec(str(model), speculative_config=options))
    prompt = AutoTokenizer.from_pretrained(model)("List the numbers from one to fifty:")
    request = Request(prompt["input_ids"], tokens)
    engine.generate([request])
    worker = engine._scheduler.draft_worker
    steps: list[float] = []
    forwards: list[float] = []
    timed(worker, "_decode", steps)
    timed(worker._target_worker, "forward_batch_generation", forwards)
    engine.generate([request])
    own = [step - forward for step, forward in zip(steps, forwards[-len(steps) :], strict=True)]
    print(
        f"{len(steps)} steps of {nodes} nodes on {torch.get_num_threads()} threads: "
        f"{1000 * median(own):.2f} ms of our own, {1000 * median(forwards):.1f} ms of forward"
    )


if __name__ == "__main__":
    typer.run(main)
