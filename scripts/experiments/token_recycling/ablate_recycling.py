"""Measure how many tokens per step each part of Token Recycling contributes, without an engine.

    python -m scripts.experiments.token_recycling.ablate_recycling MODEL \\
        --prompts spec_bench_dev.jsonl --limit 40 --nodes 15 --nodes 80 --work WORK \\
        --output results/recycling_ablation.json

Each setting decodes all turns of all prompts greedily. The package's own drafters draft and learn
from the logits of a float32 target at all nodes of their trees. `recycling_variants.py` lists the
settings by name; `--primed` adds those that start from a primed matrix, such as `dynamic primed`.
All settings go through the prompts side by side, and the target's outputs are cached in WORK, so an
interrupted run catches up quickly, and another setting only evaluates nodes that no earlier setting
needed. A setting is skipped if OUTPUT already has its results for all prompts under the same
conditions. `report_recycling.py` tabulates and plots the results. Needs transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from drafttree.bench.chat import Chat, model_context
from drafttree.bench.machine import processor_name
from drafttree.bench.prompts import Prompt, load_prompts
from drafttree.tree import DraftTree
from drafttree.verify import verify_target
from scripts.experiments.common import Replayed, figures
from scripts.experiments.token_recycling.known_target import TOP, Known, KnownTarget
from scripts.experiments.token_recycling.recycling_variants import (
    SETTINGS,
    Order,
    Setting,
    TableDrafter,
    current_name,
    move_bigrams,
)

_ROWS = 256

Decoding = Generator[list[int], None, Replayed]
"""Yields the nodes of each tree, which must be evaluated before it resumes; returns the counts."""


def decode(drafter: TableDrafter, setting: Setting, known: Known, vocab: int) -> Decoding:
    """Replay the decoding of one prompt's answer; the drafter must be allocated for one request."""
    slots = torch.tensor([0])
    drafter.start(0, known.prompt)
    if setting.prompt_logits:
        tokens = torch.tensor(known.prompt, dtype=torch.int32)
        previous = torch.cat((tokens.new_tensor([-1]), tokens))
        for start in range(0, len(tokens) - 1, _ROWS):
            rows = slice(start, min(start + _ROWS, len(tokens) - 1))
            logits = as_logits(known.prompt_tops[rows], vocab)
            drafter.observe(slots.expand(len(logits)), tokens[rows], previous[rows], logits)
    if setting.prompt_bigrams:
        move_bigrams(drafter.tables, known.prompt)
    trees = DraftTree.of_roots(torch.tensor([known.prompt[-1]], dtype=torch.int32))
    done = steps = drafts = 0
    while True:
        nodes = _nodes_of(trees, known, done)
        yield [node for node in nodes if node >= 0]
        tops = [known.tops[node] if node >= 0 else [-1] * TOP for node in nodes]
        previous = trees.previous_tokens(drafter.previous_tokens(slots))
        logits = as_logits(torch.tensor(tops), vocab)
        likely = drafter.observe(slots.expand(len(nodes)), trees.tokens[0], previous[0], logits)
        verified = verify_target(trees, likely[None], drafter.max_depth)
        drafter.on_verified(slots, trees, verified)
        emitted = verified.emitted[0, : verified.num_emitted[0]].tolist()
        expected = known.answer[done : done + len(emitted)]
        assert emitted[: len(expected)] == expected
        done += len(expected)
        if done == len(known.answer):
            drafter.release([0])
            # The first token comes from the prompt's forward, which is not a step.
            return Replayed(steps, done - 1, drafts)
        trees = drafter.propose(slots, torch.tensor(expected[-1:], dtype=torch.int32))
        steps += 1
        drafts += int((trees.tokens[0, 1:] >= 0).sum())


def _nodes_of(trees: DraftTree, known: Known, root: int) -> list[int]:
    """The node of each column of a tree whose root is the node `root`; -1 for padding."""
    nodes = [root]
    columns = zip(trees.tokens[0, 1:].tolist(), trees.parents[0, 1:].tolist(), strict=True)
    for token, parent in columns:
        nodes.append(known.child(nodes[parent], token) if token >= 0 else -1)
    return nodes


def as_logits(tops: Tensor, vocab: int) -> Tensor:
    """Logits `[N, V]` whose most likely tokens are `tops`, int `[N, 8]`; drafters use no others. A
    row of -1 gives logits of zero."""
    values = torch.arange(TOP, 0, -1.0).expand(tops.shape).masked_fill(tops < 0, 0)
    return torch.zeros(len(tops), vocab).scatter(1, tops.clamp(min=0).long(), values)


@dataclass
class Measured:
    """A setting that is being measured.

    Attributes:
        name: Name of the setting.
        num_draft_tokens: Number of draft tokens of a tree.
        setting: The setting.
        drafter: The setting's drafter.
        found: The counts of each prompt's turns, by the prompt's index.
    """

    name: str
    num_draft_tokens: int
    setting: Setting
    drafter: TableDrafter
    found: dict[int, list[Replayed]]


class Bench:
    """Replays the decoding of all prompts in any setting."""

    def __init__(self, model: Path, prompts: list[Prompt], most: int, work: Path) -> None:
        self.target = KnownTarget(model, work, most)
        self.prompts = prompts
        self._chat = Chat(model)
        self._context = model_context(model)
        self._most = most

    def begin(self, name: str, num_draft_tokens: int) -> Measured:
        """Start measuring a setting."""
        drafter = SETTINGS[name].make(self.target.vocab, num_draft_tokens)
        drafter.allocate(1, self._context)
        return Measured(name, num_draft_tokens, SETTINGS[name], drafter, {})

    def order(self, order: Order) -> list[int]:
        """The indices of the prompts in the given order."""
        numbers = list(range(len(self.prompts)))
        if order == "category":
            names = list(dict.fromkeys(prompt.category for prompt in self.prompts))
            numbers.sort(key=lambda number: names.index(self.prompts[number].category))
        elif order == "shuffled":
            random.Random(0).shuffle(numbers)
        return numbers

    def answer(self, number: int, settings: list[Measured], primed: Tensor | None) -> None:
        """Replay the decoding of one prompt in all settings."""
        prompt = self.prompts[number]
        answers: list[str] = []
        for turn in range(len(prompt.turns)):
            # As in `drafttree bench`, a chat that is too long for the context loses its beginning.
            tokens = self._chat.render(prompt.turns[: turn + 1], answers)
            known = self.target.begin(tokens[-(self._context - self._most) :])
            self._settle(known, settings, number, primed)
            self.target.finish(known)
            answers.append(self._chat.decode(known.answer))

    def _settle(
        self, known: Known, settings: list[Measured], number: int, primed: Tensor | None
    ) -> None:
        running: list[tuple[Measured, Decoding]] = []
        for each in settings:
            if each.setting.cold or not each.found:
                each.drafter.reset()
                if each.setting.primed and primed is not None:
                    matrix = each.drafter.tables.matrix
                    matrix.copy_(primed[:, : matrix.shape[1]])
            each.found.setdefault(number, [])
            running.append((each, decode(each.drafter, each.setting, known, self.target.vocab)))
        while running:
            trees, unfinished = [], []
            for each, decoding in running:
                try:
                    trees.append(next(decoding))
                    unfinished.append((each, decoding))
                except StopIteration as done:
                    each.found[number].append(done.value)
            self.target.learn(known, trees)
            running = unfinished

    def figures(self, measured: Measured) -> dict[str, Any]:
        """The figures of a setting for the prompts so far."""
        numbers = sorted(measured.found)
        counts = {number: _sum(measured.found[number]) for number in numbers}
        categories: dict[str, list[Replayed]] = {}
        for number, count in counts.items():
            categories.setdefault(self.prompts[number].category, []).append(count)
        return {
            **figures(list(counts.values())),
            "prompts_done": len(counts),
            "tokens": sum(each.tokens for each in counts.values()),
            "categories": {
                name: round(sum(each.tokens for each in some) / sum(each.steps for each in some), 4)
                for name, some in categories.items()
            },
            "by_prompt": [[each.steps, each.tokens] for each in counts.values()],
        }


def _sum(counts: list[Replayed]) -> Replayed:
    return Replayed(
        steps=sum(each.steps for each in counts),
        tokens=sum(each.tokens for each in counts),
        draft_tokens=sum(each.draft_tokens for each in counts),
    )


def read_primed(file: Path, vocab: int) -> Tensor:
    """Read the primed matrix of a file, int32 `[V, 8]`.

    Raises:
        ValueError: The matrix has another type or shape.
    """
    from safetensors.torch import load_file

    matrix = load_file(file)["matrix"]
    if matrix.dtype != torch.int32 or matrix.shape != (vocab, TOP):
        raise ValueError(
            f"{file}: matrix is {matrix.dtype} {[*matrix.shape]}, not int32 [{vocab}, {TOP}]"
        )
    return matrix


CONDITIONS = (
    *("setting", "nodes", "model", "dtype", "prompts", "limit", "max_new_tokens", "start"),
    "primed",
)
"""The keys that identify a run in a results file; the other keys are results."""


class Results:
    """The runs of a results file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        runs = json.loads(file.read_text()) if file.exists() else []
        for run in runs:
            run["setting"] = current_name(run["setting"])
        self._runs = {tuple(run[name] for name in CONDITIONS): run for run in runs}

    def prompts_done(self, conditions: dict[str, Any]) -> int:
        """Number of prompts that the run under these conditions has finished."""
        found = self._runs.get(tuple(conditions[name] for name in CONDITIONS), {})
        return int(found.get("prompts_done", 0))

    def put(self, conditions: dict[str, Any], found: dict[str, Any]) -> None:
        """Add or update a run."""
        self._runs[tuple(conditions[name] for name in CONDITIONS)] = {**conditions, **found}

    def write(self) -> None:
        """Write the file atomically, with one run per line."""
        part = self._file.with_suffix(".part")
        lines = ",\n".join(json.dumps(run) for run in self._runs.values())
        part.write_text(f"[\n{lines}\n]\n")
        part.replace(self._file)


def main(
    model: Path,
    prompts: Annotated[Path, typer.Option(help="In Spec-Bench's format; all turns are asked.")],
    output: Annotated[Path, typer.Option(help="JSON; an existing file is continued.")],
    work: Annotated[Path, typer.Option(help="Folder of the cache, shared by all settings.")],
    limit: int = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per turn.")] = 96,
    nodes: Annotated[
        list[int] | None, typer.Option(help="May be repeated. Default: 15 and 80.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A setting; may be repeated.")] = None,
    primed: Annotated[
        Path | None, typer.Option(help="A safetensors file with `matrix`, int32 [V, 8].")
    ] = None,
) -> None:
    """Measure settings."""
    names = only or [name for name, each in SETTINGS.items() if primed or not each.primed]
    if unknown := [name for name in names if name not in SETTINGS]:
        raise typer.BadParameter(f"--only {unknown[0]!r} is not one of: {', '.join(SETTINGS)}")
    if primed is None and (lost := [name for name in names if SETTINGS[name].primed]):
        raise typer.BadParameter(f"--only {lost[0]!r} needs --primed")
    bench = Bench(model, load_prompts(prompts, limit), max_new_tokens, work)
    matrix = read_primed(primed, bench.target.vocab) if primed else None
    results = Results(output)
    common = {
        "model": model.resolve().name,
        "dtype": "float32",
        "prompts": prompts.name,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "processor": processor_name(),
    }

    def conditions(name: str, count: int) -> dict[str, Any]:
        return {
            "setting": name,
            "nodes": count,
            **common,
            "start": "cold" if SETTINGS[name].cold else "hot",
            "primed": primed.name if primed and SETTINGS[name].primed else None,
        }

    chosen = [
        (name, count)
        for count in nodes or (15, 80)
        for name in names
        if SETTINGS[name].fits(count)
        and results.prompts_done(conditions(name, count)) < len(bench.prompts)
    ]
    for order in dict.fromkeys(SETTINGS[name].order for name, _ in chosen):
        settings = [bench.begin(*each) for each in chosen if SETTINGS[each[0]].order == order]
        for done, number in enumerate(bench.order(order), 1):
            bench.answer(number, settings, matrix)
            for each in settings:
                results.put(conditions(each.name, each.num_draft_tokens), bench.figures(each))
            results.write()
            typer.echo(f"{done} of {len(bench.prompts)} prompts")
        for each in settings:
            found = bench.figures(each)
            typer.echo(
                f"{each.name}, {each.num_draft_tokens} draft tokens: "
                f"{found['mean_accepted_tokens']:.3f} ± {found['standard_error']:.3f} "
                f"({found['nodes_a_step']:.1f} draft tokens per step)"
            )


if __name__ == "__main__":
    typer.run(main)
