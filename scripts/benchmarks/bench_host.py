"""Host time that draft trees add to a step of vLLM's V2 model runner, on a CPU.

    .venv-vllm/bin/python scripts/benchmarks/bench_host.py --output host.json

The real engine decodes one request in Triton's interpreter. The calls of a drafted step are kept,
and repeated with the launches of kernels stubbed and with what the engine does itself (its own
preparation, logits, sampler) replaced by what it returned. What is left is Python and PyTorch's
own operations on small tensors, which run on this CPU. Launching a kernel takes a GPU's host some
microseconds more, which are not in the figure.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any
from unittest import mock

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

import v2_on_cpu
from random_prompts import some_prompts
from tiny_models import make_tiny_llama
from triton_on_cpu import ENVIRONMENT as TRITON
from vllm_runs import ENVIRONMENT

from drafttree.bench.machine import processor_name

PARTS = ("prepare_attn", "build", "sample", "propose")
"""Positions and masks; attention metadata, in the place of the engine's own; verification and KV
moves; the next draft."""

ADDED = ("prepare_attn", "sample", "propose")
"""What is added to a step of the engine."""


class KeptCalls:
    """Keeps the arguments of the calls of the last drafted step, and what the engine returned.

    Args:
        nodes: Draft tokens of each tree.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.returned: dict[str, Any] = {}
        self._drafted = False

    def watch(self) -> None:
        """Watch this process's engine, which must not have started yet."""
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        from drafttree.vllm.attention.triton import TritonTreeMetadataBuilder
        from drafttree.vllm.v2 import runner
        from drafttree.vllm.v2.speculator import TreeSpeculator

        self.owners: dict[str, Any] = {
            "prepare_attn": runner.TreeRunnerV2,
            "build": TritonTreeMetadataBuilder,
            "sample": runner.TreeRunnerV2,
            "propose": TreeSpeculator,
        }
        self.stubbed: list[tuple[Any, str]] = [
            (GPUModelRunner, "prepare_attn"),
            (Sampler, "sample"),
            (Sampler, "get_logprobs_dims"),
            (runner, "get_num_sampled_and_rejected"),
        ]
        for name, owner in self.owners.items():
            setattr(owner, name, self._keeping(name, getattr(owner, name)))
        for owner, name in self.stubbed:
            setattr(owner, name, self._returning(owner, name, getattr(owner, name)))

    def _keeping(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if part == "prepare_attn":
                self._drafted = args[1].num_draft_tokens == self.nodes
            if self._drafted:
                self.calls[part] = (function, args, kwargs)
            return function(*args, **kwargs)

        return call

    def _returning(self, owner: Any, name: str, function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self._drafted:
                self.returned[f"{owner.__name__}.{name}"] = result
            return result

        return call

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Stub launches, and the engine's own part of the calls."""
        from triton.runtime.interpreter import InterpretedFunction

        model_runner = self.calls["sample"][1][0]
        function, (_, hidden, *others), named = self.calls["sample"]
        logits = model_runner.model.compute_logits(hidden[: 1 + self.nodes])
        # The engine gathers the rows that have logits too; here that is as long as their copy.
        self.calls["sample"] = function, (model_runner, hidden[:, :1], *others), named

        def launch(*args: Any, **kwargs: Any) -> None:
            """Launch nothing."""

        with ExitStack() as stack:

            def stub(owner: Any, name: str, function: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, function))

            stub(InterpretedFunction, "__getitem__", lambda *args: launch)
            stub(model_runner.model, "compute_logits", lambda *args: logits)
            for owner, name in self.stubbed:
                result = self.returned[f"{owner.__name__}.{name}"]
                stub(owner, name, lambda *args, result=result, **kwargs: result)
            yield


@contextmanager
def zeroed_memory() -> Iterator[None]:
    """Let allocated memory hold zeros, where what kernels would have written is an index."""
    with (
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
        mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
    ):
        yield


def kept_calls(nodes: int) -> KeptCalls:
    """Decode one request, and keep the calls of its last step with a whole tree."""
    import triton_on_cpu

    v2_on_cpu.enable()
    triton_on_cpu.enable()
    triton_on_cpu.use_for_all_operations()
    from vllm import LLM, SamplingParams

    calls = KeptCalls(nodes)
    calls.watch()
    with TemporaryDirectory() as folder:
        llm = LLM(
            model=str(make_tiny_llama(Path(folder))),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            num_gpu_blocks_override=20,
            skip_tokenizer_init=True,
            speculative_config={"method": "token_recycling", "nodes": nodes, "prime": False},
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": some_prompts(1)[0]}], sampling, use_tqdm=False)
    # The engine ends with the process, as its runner is called again.
    calls.llm = llm  # type: ignore[attr-defined]
    return calls


def measured(calls: KeptCalls, repeat: int) -> dict[str, float]:
    """Median microseconds of each part, and of what is added altogether; also the least of that.

    `gathers` is the part of it that the engine spends without drafttree too: it gathers the hidden
    states and the positions of the rows that have logits.
    """
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def repeated(parts: Sequence[str]) -> None:
        for _ in range(repeat):
            for part in parts:
                function, args, kwargs = calls.calls[part]
                began = perf_counter()
                function(*args, **kwargs)
                seconds[part].append(perf_counter() - began)

    with calls.replaced(), torch.inference_mode():
        with zeroed_memory():
            repeated(("prepare_attn", "build"))
        seconds["prepare_attn"].clear()
        repeated(ADDED)
        _, hidden, batch, *_ = calls.calls["sample"][1]
        seconds["gathers"] = []
        for _ in range(repeat):
            began = perf_counter()
            _ = hidden[batch.logits_indices], batch.positions[batch.logits_indices]
            seconds["gathers"].append(perf_counter() - began)
    warm = {part: each[repeat // 10 :] for part, each in seconds.items()}
    added = [sum(each) for each in zip(*(warm[part] for part in ADDED), strict=True)]
    return {
        **{part: 1e6 * median(each) for part, each in warm.items()},
        "added": 1e6 * median(added),
        "fastest": 1e6 * min(added),
    }


def main(
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    nodes: Annotated[int, typer.Option(help="Draft tokens of the tree.")] = 80,
    repeat: Annotated[int, typer.Option(help="How often to repeat the step.")] = 3000,
) -> None:
    """Measure a step of one greedy request with Token Recycling."""
    os.environ |= ENVIRONMENT | v2_on_cpu.ENVIRONMENT | TRITON
    torch.set_num_threads(1)
    figures = measured(kept_calls(nodes), repeat)
    import vllm

    report = {
        "nodes": nodes,
        "requests": 1,
        "microseconds": {name: round(each, 1) for name, each in figures.items()},
        "device": processor_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
