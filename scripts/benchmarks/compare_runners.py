"""Compares tokens a step of vLLM's two model runners, on a CPU.

    .venv-vllm/bin/python scripts/benchmarks/compare_runners.py MODEL PROMPTS --output runners.json

V2 runs as in the tests (`tests/support/v2_on_cpu.py`): the real engine with asynchronous
scheduling, and Triton's interpreter, so its times mean nothing. The first prompt of each category
is asked, one at a time, greedily, with the drafter's defaults. Both runners begin with nothing
learned, and keep what they learn from prompt to prompt. V1 cuts a tree to as many nodes as tokens
may follow, V2 does not, so steps near the end of a short answer are also left out.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from bench_answers import Answered, bench_answers

from drafttree.bench.chat import Chat
from drafttree.bench.machine import model_name
from drafttree.bench.prompts import Prompt, load_prompts

TIMEOUT = 3600.0
"""Seconds that an engine may take."""


def first_of_each_category(path: Path) -> list[Prompt]:
    """The first prompt of each category, in the file's order."""
    found: dict[str, Prompt] = {}
    for prompt in load_prompts(path):
        found.setdefault(prompt.category, prompt)
    return [*found.values()]


def tokens_a_step(ends: list[list[int]], most: int) -> float:
    """Tokens of the steps that began after at most so many tokens, by the number of them."""
    steps = [after - before for each in ends for before, after in pairwise(each) if before <= most]
    return sum(steps) / len(steps)


def figures(answered: Answered, plain: Answered, tokens: int, nodes: int) -> dict[str, Any]:
    """What is reported of a runner."""
    return {
        "tokens_a_step": tokens_a_step(answered.ends, tokens),
        "before_the_end": tokens_a_step(answered.ends, tokens - nodes),
        "identical": sum(map(list.__eq__, answered.tokens, plain.tokens)),
        "steps": [len(each) - 1 for each in answered.ends],
        "counters": answered.counters,
    }


def main(
    model: Path,
    prompts: Annotated[Path, typer.Argument(help="JSON lines in Spec-Bench's format.")],
    output: Annotated[Path, typer.Option(help="JSON file, to which the comparison is added.")],
    nodes: Annotated[int, typer.Option(help="Draft tokens of each tree.")] = 15,
    static: Annotated[bool, typer.Option(help="A static tree; otherwise trees grow.")] = False,
    cold: Annotated[bool, typer.Option(help="Forget each prompt before the next.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
) -> None:
    """Answer the prompts with both runners, with trees and plainly, and compare."""
    import vllm

    options: dict[str, Any] = {"method": "token_recycling", "nodes": nodes, "prime": False}
    if static:
        options["tree"] = "static"
    if cold:
        options["hot_start"] = False
    chosen, chat = first_of_each_category(prompts), Chat(model)
    rendered = [chat.render(prompt.turns[:1], []) for prompt in chosen]

    def answered(runner: str, speculative: dict[str, Any] | None) -> Answered:
        return bench_answers(model, rendered, tokens, runner, speculative, TIMEOUT)

    plain = answered("v1", None)
    v1, v2 = (figures(answered(runner, options), plain, tokens, nodes) for runner in ("v1", "v2"))
    report = {
        "model": model_name(model),
        "dtype": "float32",
        "options": options,
        "prompts": [prompt.question_id for prompt in chosen],
        "tokens": sum(map(len, plain.tokens)),
        "difference": {name: v2[name] - v1[name] for name in ("tokens_a_step", "before_the_end")},
        "v1": v1,
        "v2": v2,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
    done = json.loads(output.read_text()) if output.exists() else []
    output.write_text(json.dumps([*done, report], indent=1) + "\n")
    for name, each in (("V1", v1), ("V2", v2)):
        typer.echo(
            f"{name}: {each['tokens_a_step']:.4f} tokens a step, {each['before_the_end']:.4f} "
            f"before the last {nodes} tokens of an answer; {each['identical']} of "
            f"{len(chosen)} answers are those of plain decoding on V1"
        )


if __name__ == "__main__":
    typer.run(main)
