"""Have a chat model write its own prompts and answer them: text to train a drafter on.

    .venv-vllm/bin/python -m scripts.experiments.lyanna.write_text \\
        MODEL --output text.jsonl --conversations 20000

The model continues an empty user turn, half of the time after one of a few openings, and then
answers what it wrote. With `--seeds`, two of three turns begin like a prompt of that file; every
second prompt is used, starting with the first. The output has one conversation per line in
ShareGPT's format. An interrupted run is resumed. Needs vLLM.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from lyanna_plugin.training.dataset import read_conversations
from lyanna_plugin.training.regenerate import whole_lines

OPENINGS = (
    *("Write a ", "Explain ", "How do I ", "What is ", "Why ", "Summarize ", "Translate "),
    *("Who ", "When did ", "Describe ", "Compare ", "List ", "Give me ", "Can you ", "Imagine "),
    *("Write a Python function ", "Solve ", "A train ", "If ", "Rewrite ", "Is it true that "),
    *("Read the following text ", "Document: ", "Question: ", "Please ", "My ", "In the "),
    *("Fix this code:\n", "Draft an email ", "Tell me a story ", "Create ", "Suggest ", "The "),
)
_SEEDED = 2 / 3
"""Fraction of the turns that begin like a prompt, if there are prompts."""
_WORDS = 40
"""Maximum number of words taken from a prompt."""


def opening(seeds: list[str], rng: random.Random) -> str:
    """The beginning of a user turn."""
    if seeds and rng.random() < _SEEDED:
        words = rng.choice(seeds).split(" ")
        return " ".join(words[: rng.randint(1, min(_WORDS, len(words)))]) + " "
    return rng.choice(OPENINGS) if rng.random() < 0.5 else ""


def user_turns(
    llm: Any, tokenizer: Any, count: int, seeds: list[str], rng: random.Random
) -> list[str]:
    """About `count` user turns written by the model."""
    from vllm import SamplingParams

    mark = "\N{REPLACEMENT CHARACTER}"
    chat = [{"role": "user", "content": mark}]
    before, _ = tokenizer.apply_chat_template(chat, tokenize=False).split(mark, 1)
    openings = [opening(seeds, rng) for _ in range(count)]
    written = llm.generate(
        [before + opening for opening in openings],
        SamplingParams(temperature=1.0, top_k=100, max_tokens=120),
        use_tqdm=False,
    )
    turns = [
        (opening + output.outputs[0].text).strip()
        for opening, output in zip(openings, written, strict=True)
        if output.outputs[0].finish_reason == "stop"
    ]
    return [turn for turn in turns if len(turn.split()) > 3]


def answers(llm: Any, turns: list[str], max_tokens: int, rng: random.Random) -> list[str]:
    """The model's answers; three in four are greedy."""
    from vllm import SamplingParams

    outputs = llm.chat(
        [[{"role": "user", "content": turn}] for turn in turns],
        [
            SamplingParams(temperature=0.0 if rng.random() < 0.75 else 0.7, max_tokens=max_tokens)
            for _ in turns
        ],
        use_tqdm=False,
    )
    return [output.outputs[0].text for output in outputs]


def main(
    model: Path,
    output: Annotated[Path, typer.Option(help="JSON lines; an existing file is continued.")],
    conversations: int = 1000,
    max_answer_tokens: int = 192,
    together: Annotated[int, typer.Option(help="Number of conversations per batch.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 0,
    seeds: Annotated[Path | None, typer.Option(help="Prompts in Spec-Bench's format.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type; use float32 on a CPU without AVX-512.")
    ] = "bfloat16",
) -> None:
    """Write conversations."""
    import vllm

    prompts = [] if seeds is None else list(read_conversations(seeds))[::2]
    openings = [message["content"] for chat in prompts for message in chat]
    done = whole_lines(output)
    llm = vllm.LLM(
        str(model), dtype=dtype, max_num_seqs=together, max_model_len=1024, seed=seed + done
    )
    tokenizer = llm.get_tokenizer()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with output.open("a", encoding="utf-8") as file, Progress(*columns) as progress:
        task = progress.add_task("", total=conversations, completed=done)
        while done < conversations:
            rng = random.Random(seed + done)
            turns = user_turns(llm, tokenizer, together, openings, rng)
            for turn, answer in zip(
                turns, answers(llm, turns, max_answer_tokens, rng), strict=True
            ):
                said = (("human", turn), ("gpt", answer))
                line = {"conversations": [{"from": who, "value": what} for who, what in said]}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            done += len(turns)
            progress.update(task, completed=done)


if __name__ == "__main__":
    typer.run(main)
