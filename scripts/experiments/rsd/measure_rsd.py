"""Measure the block efficiency of draft trees for a target and a draft model, without an engine.

The target answers each prompt once in each sampling setting. At some positions of these answers
trees of all shapes are drawn, RSD's by its own drafter, and the expected number of tokens per step
is computed exactly for every tree and every rule of acceptance that suits it. Results are appended
to OUTPUT line by line, so an interrupted run can be resumed:

    python -m scripts.experiments.rsd.measure_rsd TARGET DRAFT \\
        --prompts FILE --limit 26 --output rsd.jsonl

Needs transformers. `scripts/experiments/rsd/report_rsd.py` makes the table and the plots.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from drafttree.bench.chat import Chat
from drafttree.bench.machine import processor_name
from drafttree.bench.prompts import load_prompts
from drafttree.model_files import weights_size
from scripts.experiments.rsd.answers import SETTINGS, Model
from scripts.experiments.rsd.positions import Position, measure

GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio: its multiples modulo 1 spread any number of positions evenly."""


def main(
    target: Path,
    draft: Path,
    prompts: Annotated[Path, typer.Option(help="In Spec-Bench's format; first turns are used.")],
    output: Annotated[Path, typer.Option(help="JSON lines; an existing file is continued.")],
    limit: int = 26,
    max_new_tokens: int = 64,
    places: Annotated[int, typer.Option(help="Number of positions in each answer.")] = 3,
    dtype: str = "bfloat16",
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 10**6,
    max_nodes: Annotated[int, typer.Option(help="Draft tokens of the largest tree.")] = 30,
) -> None:
    """Measure every tree at some positions of the target's answers."""
    target_model = Model(target, getattr(torch, dtype))
    draft_model = Model(draft, getattr(torch, dtype))
    chat = Chat(target)
    lines = (
        [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    )
    answers = {line["prompt"]: line["answers"] for line in lines if "answers" in line}
    done = {(line["prompt"], line["setting"], line["place"]) for line in lines if "tokens" in line}
    with output.open("a", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        if not lines:
            write(
                {
                    "target": target.name,
                    "draft": draft.name,
                    "draft_size_ratio": weights_size(draft) / weights_size(target),
                    "dtype": dtype,
                    "device": processor_name(),
                    "prompts_file": prompts.name,
                    "limit": limit,
                    "max_new_tokens": max_new_tokens,
                    "max_nodes": max_nodes,
                    "max_prompt_tokens": max_prompt_tokens,
                }
            )
        rendered = {
            str(prompt.question_id): chat.render(prompt.turns[:1], [])[-1900:]
            for prompt in load_prompts(prompts, limit)
        }
        rendered = {name: ids for name, ids in rendered.items() if len(ids) <= max_prompt_tokens}
        for name, ids in track(rendered.items(), "answering"):
            if name not in answers:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                answers[name] = target_model.answer(ids, max_new_tokens, generator)
                write({"prompt": name, "answers": answers[name]})
        work = [(n, name, key) for n in range(places) for name in rendered for key in SETTINGS]
        for number, name, key in track(work, "measuring"):
            if (name, key, number) in done:
                continue
            answer, seed = answers[name][key], zlib.crc32(f"{name} {key} {number}".encode())
            # With the golden ratio, later positions fall into the gaps between earlier ones.
            fraction = (zlib.crc32(name.encode()) / 2**32 + number * GOLDEN) % 1.0
            at = int(fraction * max(1, len(answer) - 1))
            text = rendered[name] + answer[: at + 1]
            for model in (target_model, draft_model):
                model.read(text[:-1])
            position = Position(draft_model, text[-1], SETTINGS[key], seed, max_nodes)
            tokens = measure(position, target_model, text[-1], SETTINGS[key])
            write({"prompt": name, "setting": key, "place": number, "at": at, "tokens": tokens})


if __name__ == "__main__":
    typer.run(main)
