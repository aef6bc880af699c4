"""What each part of Token Recycling is worth in tokens a step, measured without an engine.

    python scripts/ablate_recycling.py MODEL --prompts spec_bench_dev.jsonl --limit 40 \\
        --nodes 15 --nodes 80 --output results/recycling_ablation.json

Each setting answers all prompts, all turns, greedily in float32: the product's own drafters draft,
the target reads each tree in one forward under the tree mask, and what is accepted is what it says
there. `recycling_variants.py` has the settings by name; with `--primed` also as in `grown primed`.
Every setting that is done is in the file; one that is there under the same conditions is not
measured again. `report_recycling.py` draws what is in the file. Needs transformers.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measure_lyanna import figures
from recycling_variants import SETTINGS, Setting, TableDrafter, move_bigrams
from rich.progress import track
from torch import Tensor
from tree_kernels.mask import depths, tree_mask

from drafttree.bench.chat import Chat, model_context
from drafttree.bench.machine import processor_name
from drafttree.bench.prompts import Prompt, load_prompts
from drafttree.drafter import DraftTree
from drafttree.verify import verify_greedy
from lyanna_plugin.replay import Replayed

_PROMPTS_KEPT = 128
_ROWS = 256


@dataclass(frozen=True)
class Answer:
    """One turn's answer.

    Attributes:
        tokens: with the end of text, if it came.
        steps: of decoding, the prompt's own forward not counted.
        nodes: draft nodes that were verified.
    """

    tokens: list[int]
    steps: int
    nodes: int


class Target:
    """A causal LM in float32 that reads one text at a time, and trees at its end."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        end = model.generation_config.eos_token_id
        self.ends = set(end) if isinstance(end, list) else {end}
        self.vocab: int = model.config.vocab_size
        self._model = model
        self._read: dict[tuple[int, ...], tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}

    def read(self, prompt: Sequence[int]) -> Tensor:
        """Begin a text; its hidden states, `[T, d]`. Prompts are remembered: all settings' are the
        same."""
        from transformers import DynamicCache

        self._cache: Any = DynamicCache()
        known = self._read.get(tuple(prompt))
        if known is not None:
            for layer, (keys, values) in enumerate(known[1]):
                self._cache.update(keys, values, layer)
            return known[0]
        hidden = self._forward(torch.tensor([prompt]))
        if len(self._read) < _PROMPTS_KEPT:
            kept = [(layer.keys, layer.values) for layer in self._cache.layers]
            self._read[tuple(prompt)] = hidden, kept
        return hidden

    def read_tree(self, trees: DraftTree) -> Tensor:
        """The logits `[N, V]` at the nodes of one tree at the text's end."""
        known = self._cache.get_seq_length()
        seen = tree_mask(trees.parents, trees.num_nodes)
        seen = torch.nn.functional.pad(seen, (known, 0), value=True)
        hidden = self._forward(
            trees.tokens.clamp(min=0).long(),
            attention_mask=torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None],
            position_ids=known + depths(trees.parents, trees.num_nodes).long(),
        )
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[N, V]` of hidden states `[N, d]`."""
        with torch.inference_mode():
            logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def keep(self, path: Tensor, nodes: int) -> None:
        """Of the last tree of `nodes` nodes, let those on a path `int [D]` go on the text."""
        known = self._cache.get_seq_length() - nodes
        rows = torch.cat((torch.arange(known), known + path.long()))
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]

    def _forward(self, tokens: Tensor, **given: Any) -> Tensor:
        with torch.inference_mode():
            result = self._model.base_model(
                input_ids=tokens, past_key_values=self._cache, use_cache=True, **given
            )
        hidden: Tensor = result.last_hidden_state[0]
        return hidden


def decode(
    target: Target, drafter: TableDrafter, setting: Setting, prompt: Sequence[int], most: int
) -> Answer:
    """Answer one prompt with at most `most` tokens; the drafter has room for one request."""
    slots = torch.tensor([0])
    hidden = target.read(prompt)
    drafter.start(0, prompt)
    if setting.prompt_logits:
        tokens = torch.tensor(prompt, dtype=torch.int32)
        before = torch.cat((tokens.new_tensor([-1]), tokens))
        for start in range(0, len(prompt) - 1, _ROWS):
            rows = slice(start, min(start + _ROWS, len(prompt) - 1))
            drafter.observe(tokens[rows], before[rows], target.logits(hidden[rows]))
    if setting.bigrams:
        move_bigrams(drafter.tables, prompt)
    trees = DraftTree.of_roots(torch.tensor([prompt[-1]], dtype=torch.int32))
    logits = target.logits(hidden[-1:])
    answer: list[int] = []
    steps = nodes = 0
    while True:
        before = trees.before(drafter.before(slots))
        likely = drafter.observe(trees.tokens[0], before[0], logits)
        verified = verify_greedy(trees, likely[None], drafter.max_depth)
        drafter.accepted(slots, trees, verified)
        for token in verified.emitted[0, : verified.num_emitted[0]].tolist():
            answer.append(token)
            if token in target.ends or len(answer) == most:
                drafter.release([0])
                return Answer(answer, steps, nodes)
        if steps:
            path = verified.path[0]
            target.keep(path[path >= 0], trees.tokens.shape[1])
        trees = drafter.propose(slots, torch.tensor(answer[-1:], dtype=torch.int32))
        logits = target.read_tree(trees)
        steps += 1
        nodes += int((trees.tokens[0, 1:] >= 0).sum())


class Bench:
    """Answers all prompts in any setting."""

    def __init__(self, model: Path, prompts: list[Prompt], most: int) -> None:
        self.target = Target(model)
        self._chat = Chat(model)
        self._context = model_context(model)
        self._prompts = prompts
        self._most = most

    def run(self, setting: Setting, nodes: int, primed: Tensor | None) -> dict[str, Any]:
        """The figures of a setting; by prompt in the file's order."""
        drafter = setting.make(self.target.vocab, nodes)
        drafter.allot(1, self._context)
        matrix = drafter.tables.matrix
        answers: dict[int, list[Answer]] = {}
        for index in track(self._order(setting), f"{nodes} nodes"):
            turns: list[str] = []
            answers[index] = []
            for _ in self._prompts[index].turns:
                if setting.cold or not any(answers.values()):
                    drafter.reset()
                    if primed is not None:
                        matrix.copy_(primed[:, : matrix.shape[1]])
                answer = decode(
                    self.target, drafter, setting, self._render(index, turns), self._most
                )
                answers[index].append(answer)
                turns.append(self._chat.decode(answer.tokens))
        given = [answers[index] for index in range(len(self._prompts))]
        counts = [_sum(turns) for turns in given]
        text = [answer.tokens for turns in given for answer in turns]
        categories = dict.fromkeys(prompt.category for prompt in self._prompts)
        return {
            **figures(counts),
            "tokens": sum(each.tokens for each in counts),
            "answers_crc32": f"{zlib.crc32(json.dumps(text).encode()):08x}",
            "categories": {
                name: round(_tokens_a_step(self._of_category(counts, name)), 4)
                for name in categories
            },
            "by_prompt": [[each.steps, each.tokens] for each in counts],
        }

    def _order(self, setting: Setting) -> list[int]:
        order = list(range(len(self._prompts)))
        if setting.order == "category":
            names = list(dict.fromkeys(prompt.category for prompt in self._prompts))
            order.sort(key=lambda index: names.index(self._prompts[index].category))
        elif setting.order == "shuffled":
            random.Random(0).shuffle(order)
        return order

    def _render(self, index: int, answers: list[str]) -> list[int]:
        """As `drafttree bench` asks: a chat too long for the context loses its beginning."""
        tokens = self._chat.render(self._prompts[index].turns[: len(answers) + 1], answers)
        return tokens[-(self._context - self._most) :]

    def _of_category(self, counts: list[Replayed], name: str) -> list[Replayed]:
        pairs = zip(self._prompts, counts, strict=True)
        return [each for prompt, each in pairs if prompt.category == name]


def _sum(turns: list[Answer]) -> Replayed:
    """What a prompt took; the first token of each answer is the prompt's own forward's."""
    return Replayed(
        steps=sum(answer.steps for answer in turns),
        tokens=sum(len(answer.tokens) - 1 for answer in turns),
        nodes=sum(answer.nodes for answer in turns),
    )


def _tokens_a_step(counts: list[Replayed]) -> float:
    return sum(each.tokens for each in counts) / max(1, sum(each.steps for each in counts))


def read_primed(file: Path, vocab: int) -> Tensor:
    """The matrix that a file begins with, int32 `[V, 8]`."""
    from safetensors.torch import load_file

    matrix = load_file(file)["matrix"]
    if matrix.dtype != torch.int32 or matrix.dim() != 2 or len(matrix) != vocab:
        raise ValueError(f"{file}: matrix is {matrix.dtype} {[*matrix.shape]}, not [{vocab}, 8]")
    return matrix


def write(file: Path, runs: list[dict[str, Any]]) -> None:
    """One run a line."""
    part = file.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    part.replace(file)


def main(
    model: Path,
    prompts: Annotated[Path, typer.Option(help="In Spec-Bench's format; all turns are asked.")],
    output: Annotated[Path, typer.Option(help="JSON; continued if it is there.")],
    limit: int = 40,
    max_new_tokens: Annotated[int, typer.Option(help="A turn.")] = 96,
    nodes: Annotated[list[int] | None, typer.Option(help="May be repeated; else 15, 80.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A setting; may be repeated.")] = None,
    primed: Annotated[
        Path | None, typer.Option(help="A safetensors file with `matrix`, int32 [V, 8].")
    ] = None,
) -> None:
    """Measure settings."""
    names = only or [name for name, each in SETTINGS.items() if primed or not each.primed]
    for name in names:
        if name not in SETTINGS:
            raise typer.BadParameter(f"no setting {name!r}: {', '.join(SETTINGS)}")
        if SETTINGS[name].primed and primed is None:
            raise typer.BadParameter(f"{name!r} needs --primed")
    bench = Bench(model, load_prompts(prompts, limit), max_new_tokens)
    matrix = read_primed(primed, bench.target.vocab) if primed else None
    runs: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
    for count in nodes or (15, 80):
        for name in names:
            setting = SETTINGS[name]
            conditions = {
                "setting": name,
                "nodes": count,
                "model": model.resolve().name,
                "dtype": "float32",
                "prompts": prompts.name,
                "limit": limit,
                "max_new_tokens": max_new_tokens,
                "cold": setting.cold,
                "primed": primed.name if primed and setting.primed else None,
            }
            if any(conditions.items() <= run.items() for run in runs) or not setting.fits(count):
                continue
            found = bench.run(setting, count, matrix if setting.primed else None)
            runs.append({**conditions, "processor": processor_name(), **found})
            write(output, runs)
            typer.echo(
                f"{name}, {count} nodes: {found['mean_accepted_tokens']:.3f} "
                f"± {found['standard_error']:.3f} ({found['nodes_a_step']:.1f} nodes a step, "
                f"{found['steps']} steps, answers {found['answers_crc32']})"
            )


if __name__ == "__main__":
    typer.run(main)
