"""Measure the block efficiency of draft trees for a target and a draft model, without an engine.

The target answers each prompt once in each sampling setting. At some positions of these answers
every RSD tree is sampled by RSD's own drafter, and the expected number of tokens per step of every
tree is computed exactly. Results are appended to OUTPUT line by line, so an interrupted run can be
resumed:

    python -m scripts.experiments.rsd.measure_rsd TARGET DRAFT \\
        --prompts FILE --limit 26 --output rsd.jsonl

Needs transformers. `scripts/experiments/rsd/report_rsd.py` makes the table and the plots.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor

from drafttree.bench.chat import Chat
from drafttree.bench.machine import processor_name
from drafttree.bench.prompts import load_prompts
from drafttree.model_files import weights_size
from rsd_plugin import RsdDrafter, RsdOptions
from scripts.experiments.rsd.rsd_expectation import (
    NodePath,
    expected_tokens,
    k_sequential,
    recursive_rejection,
)

SETTINGS = {"T=0.3": (0.3, 1.0), "T=1": (1.0, 1.0), "T=1 top-p=0.95": (1.0, 0.95)}
"""Temperature and top-p by name."""

BEAMS = (
    *("2x2", "3x2", "3x3", "4x3", "5x3", "5x4", "7x4", "6x5", "12x5", "2x5", "3x5"),
    *("2x3", "5x2", "2x7", "7x2", "3x7", "7x3", "5x6"),
)
"""The paper's trees of RSD-S (appendix D.3): lengths 2 to 5 and sizes 6 to 30, and three more."""

BRANCHES = (
    *("2-2", "2-1", "3-1", "2-2-2", "3-1-1", "4-1-1", "3-2-1", "2-1-1", "2-2-1", "5-1", "7-1"),
    *("2-2-2-2", "5-1-1-1", "7-1-1-1", "2-1-1-1-1", "2-2-1-1-1", "2-2-2-2-2"),
    *("6-1-1-1-1", "12-1-1-1-1", "2-1-1-1-1-1-1", "3-1-1-1-1-1-1", "3-2-2", "7-1-1"),
    "5-1-1-1-1-1",
)
"""The paper's trees of RSD-C for the same lengths and sizes."""

GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio: its multiples modulo 1 spread any number of positions evenly."""

CHAINS = (2, 3, 4, 5, 6, 10, 14, 21, 30)
"""Lengths of ordinary speculative sampling."""


class Model:
    """A causal LM that evaluates one answer, and trees of tokens at positions in it."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._text: list[int] = []

    def answer(
        self, prompt: list[int], count: int, generator: torch.Generator
    ) -> dict[str, list[int]]:
        """One answer of at most `count` tokens in each setting, side by side."""
        from transformers import DynamicCache

        cache = DynamicCache()
        end = self._model.generation_config.eos_token_id
        ends = set(end) if isinstance(end, list) else {end}
        logits = self._forward(torch.tensor([prompt]), cache, logits_to_keep=1)[:, -1].float()
        cache.batch_repeat_interleave(len(SETTINGS))
        logits = logits.expand(len(SETTINGS), -1)
        answers: dict[str, list[int]] = {name: [] for name in SETTINGS}
        for _ in range(count):
            rows = zip(logits, SETTINGS.values(), strict=True)
            probs = torch.stack([distribution(row, *setting) for row, setting in rows])
            tokens = torch.multinomial(probs, 1, generator=generator)
            for answer, token in zip(answers.values(), tokens[:, 0].tolist(), strict=True):
                if not answer or answer[-1] not in ends:
                    answer.append(token)
            logits = self._forward(tokens, cache)[:, -1].float()
        return answers

    def read(self, text: list[int]) -> None:
        """Cache a text, so that trees after it can be evaluated; earlier trees are dropped."""
        from transformers import DynamicCache

        known = 0
        while known < min(len(self._text), len(text)) and self._text[known] == text[known]:
            known += 1
        if known == 0:
            self._cache = DynamicCache()
        elif surplus := self._cache.get_seq_length() - known:
            self._cache.crop(-surplus)
        if text[known:]:
            self._forward(torch.tensor([text[known:]]), self._cache, logits_to_keep=1)
        self._text = text
        self._columns: dict[NodePath, int] = {}

    def read_nodes(self, root: int, paths: list[NodePath]) -> dict[NodePath, Tensor]:
        """The logits after nodes; their parents must be read already or precede them in `paths`."""
        cached = len(self._text) + len(self._columns)
        seen = torch.zeros(1, 1, len(paths), cached + len(paths), dtype=torch.bool)
        seen[..., : len(self._text)] = True
        for row, path in enumerate(paths):
            self._columns[path] = len(self._columns)
            for length in range(len(path) + 1):
                seen[0, 0, row, len(self._text) + self._columns[path[:length]]] = True
        logits = self._forward(
            torch.tensor([[path[-1] if path else root for path in paths]]),
            self._cache,
            attention_mask=seen,
            position_ids=torch.tensor([[len(self._text) + len(path) for path in paths]]),
        )
        return dict(zip(paths, logits[0].float(), strict=True))

    def _forward(self, tokens: Tensor, cache: Any, **given: Any) -> Tensor:
        with torch.inference_mode():
            result = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, **given)
        return result.logits


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The distribution to sample from, `float32 [V]`."""
    probs = (logits / temperature).softmax(0)
    if top_p == 1.0:
        return probs
    ranked, order = probs.sort(descending=True)
    kept = ranked.cumsum(0) - ranked < top_p
    probs = torch.zeros_like(probs).scatter(0, order[kept], ranked[kept])
    return probs / probs.sum()


Drawing = Generator[list[NodePath], None, dict[NodePath, list[int]]]
"""Samples a tree: yields the nodes whose distributions it needs next, and returns the children of
the inner nodes in sampling order."""


class Position:
    """A position in an answer, with the draft model's distributions after the sampled nodes."""

    def __init__(self, draft: Model, root: int, setting: tuple[float, float], seed: int) -> None:
        self._draft = draft
        self._root = root
        self._setting = setting
        self._seed = seed
        self.probs: dict[NodePath, Tensor] = {}
        self._read([()])

    def trees(self) -> dict[str, dict[NodePath, list[int]]]:
        """All trees by name; the draft model evaluates one level of all of them at once."""
        drawings: dict[str, Drawing] = {
            **{f"SD {length}": self._rsd(f"beam:1x{length}") for length in CHAINS},
            **{f"RSD-S {beam}": self._rsd(f"beam:{beam}") for beam in BEAMS},
            **{f"RSD-C {factors}": self._rsd(f"branch:{factors}") for factors in BRANCHES},
            **{f"SpecTr {beam}": self._spectr(*map(int, beam.split("x"))) for beam in BEAMS},
        }
        trees: dict[str, dict[NodePath, list[int]]] = {}
        while drawings:
            wanted: list[NodePath] = []
            for name, drawing in list(drawings.items()):
                try:
                    wanted += next(drawing)
                except StopIteration as done:
                    trees[name] = done.value
                    del drawings[name]
            self._read([path for path in dict.fromkeys(wanted) if path not in self.probs])
        return trees

    def _rsd(self, notation: str) -> Drawing:
        """A tree as RSD's own drafter samples it."""
        options = RsdOptions(model="", tree=notation)
        nothing = torch.zeros_like(self.probs[()])
        drafter = RsdDrafter(options, len(nothing))
        root = torch.tensor([self._root], dtype=torch.int32)
        levels = drafter.levels(
            root, torch.tensor([self._seed]), torch.tensor([0]), torch.tensor([True])
        )
        children: dict[NodePath, list[int]] = {}
        paths: list[NodePath] = [()]
        trees, first = next(levels)
        while trees.tokens.shape[1] <= options.num_draft_tokens:
            here = [path for path in paths[first:] if -1 not in path]
            yield here
            probs = torch.stack([self.probs.get(path, nothing) for path in paths[first:]])
            trees, first = levels.send(probs[None])
            tokens, parents = trees.tokens[0, first:].tolist(), trees.parents[0, first:].tolist()
            for token, parent in zip(tokens, parents, strict=True):
                paths.append((*paths[parent], token))
                if token >= 0:
                    children.setdefault(paths[parent], []).append(token)
        return children

    def _spectr(self, width: int, length: int) -> Drawing:
        """Independently sampled chains, as in SpecTr."""
        generator = torch.Generator().manual_seed(self._seed)
        chains: list[NodePath] = [()] * width
        children: dict[NodePath, list[int]] = {}
        for _ in range(length):
            yield chains
            for i, path in enumerate(chains):
                token = int(torch.multinomial(self.probs[path], 1, generator=generator))
                children.setdefault(path, []).append(token)
                chains[i] = (*path, token)
        return children

    def _read(self, paths: list[NodePath]) -> None:
        if paths:
            for path, logits in self._draft.read_nodes(self._root, paths).items():
                self.probs[path] = distribution(logits, *self._setting)


def measure(
    position: Position, target: Model, root: int, setting: tuple[float, float]
) -> dict[str, float]:
    """The expected tokens per step of every tree at one position."""
    trees = position.trees()
    # The leaves need no logits: exactly one token follows an accepted leaf.
    nodes = {path for children in trees.values() for path in children}
    logits = target.read_nodes(root, sorted(nodes, key=len))
    probs: dict[NodePath, Tensor] = {}

    def of_target(path: NodePath) -> Tensor:
        if path not in probs:
            probs[path] = distribution(logits[path], *setting)
        return probs[path]

    return {
        name: expected_tokens(
            children,
            of_target,
            position.probs.__getitem__,
            k_sequential if name.startswith("SpecTr") else recursive_rejection,
        )
        for name, children in trees.items()
    }


def main(
    target: Path,
    draft: Path,
    prompts: Annotated[Path, typer.Option(help="In Spec-Bench's format; first turns are used.")],
    output: Annotated[Path, typer.Option(help="JSON lines; an existing file is continued.")],
    limit: int = 26,
    max_new_tokens: int = 64,
    places: Annotated[int, typer.Option(help="Number of positions in each answer.")] = 3,
    dtype: str = "bfloat16",
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
                }
            )
        rendered = {
            str(prompt.question_id): chat.render(prompt.turns[:1], [])[-1900:]
            for prompt in load_prompts(prompts, limit)
        }
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
            position = Position(draft_model, text[-1], SETTINGS[key], seed)
            tokens = measure(position, target_model, text[-1], SETTINGS[key])
            write({"prompt": name, "setting": key, "place": number, "at": at, "tokens": tokens})


if __name__ == "__main__":
    typer.run(main)
