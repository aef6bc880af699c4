"""What drafters of one target accept on prompts that none of them was trained on.

    .venv-vllm/bin/python scripts/measure_lyanna.py TARGET --prompts spec_bench_dev.jsonl \\
        --drafter lyanna=DIR --drafter eagle=DIR --work WORK --output results/lyanna_acceptance.json

The target answers every other line of the prompts, from the second on, greedily; decoding is then
replayed over these answers with every drafter and every setting. A drafter that feeds its tokens
back is measured in EAGLE's way. Standard errors by bootstrap over the answers. Needs vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from eagle_style import replay_eagle
from torch import Tensor

from lyanna_plugin.checkpoint import fingerprint, load
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.model import Drafter
from lyanna_plugin.replay import LyannaReplay, Replayed, Text
from lyanna_plugin.training.acceptance import measure
from lyanna_plugin.training.dataset import Sample, encode, read_conversations
from lyanna_plugin.training.features import Corpus, Features
from lyanna_plugin.training.loss import Columns, DrafterLoss, LossWeights
from lyanna_plugin.training.regenerate import regenerate

_CONTEXT = 2048
_DRAWS = 1000

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{n} nodes": {"nodes": n, "resample": False} for n in (4, 6, 8, 12, 16, 24)},
    **{
        f"{first}+{second} fused": {"nodes": first, "resample_nodes": second}
        for first, second in ((6, 6), (8, 4), (12, 4), (12, 12))
    },
    "12, then 12 alone": {"nodes": 12, "resample_nodes": 12, "fusion": False},
    "depth 5, 12 nodes": {"nodes": 12, "resample": False, "steps": 5},
}
EAGLE_SETTINGS: dict[str, dict[str, int]] = {
    **{f"{n} nodes": {"depth": 3, "nodes": n} for n in (4, 6, 8, 12, 16, 24)},
    "depth 5, 12 nodes": {"depth": 5, "nodes": 12},
}
WIDTH = 4


@dataclass(frozen=True)
class Target:
    """What is needed of the target.

    Attributes:
        embeddings, head: float32 `[V, d]`.
    """

    folder: Path
    embeddings: Tensor
    head: Tensor


def answered(folder: Path, prompts: list[Path], work: Path, max_tokens: int) -> list[Sample]:
    """Every other prompt with the target's greedy answers."""
    from transformers import AutoTokenizer

    asked = [chat for file in prompts for chat in list(read_conversations(file))[1::2]]
    file = regenerate(asked, folder, max_tokens, _CONTEXT, work, lambda done: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = (encode(chat, tokenizer, _CONTEXT) for chat in read_conversations(file))
    return [sample for sample in found if sample is not None]


def texts_of(corpus: Corpus) -> Iterator[Text]:
    """One text for each answer, with all that was said before it."""
    for index, sample in enumerate(corpus.samples):
        hidden = corpus.features(index)[0].float()
        edges = torch.diff(sample.answer.int(), prepend=torch.zeros(1), append=torch.zeros(1))
        starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if end - start > 1:
                yield Text(sample.tokens[:end].long(), hidden[:end], start)


def figures(replayed: Sequence[Replayed]) -> dict[str, float]:
    """Tokens a step with its standard error, and the draft nodes of a step."""
    counts = torch.tensor([(each.tokens, each.steps) for each in replayed]).double()
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(counts), (_DRAWS, len(counts)), generator=generator)
    sums = counts[draws].sum(1)
    steps = int(counts[:, 1].sum())
    return {
        "mean_accepted_tokens": float(counts[:, 0].sum()) / steps,
        "standard_error": float((sums[:, 0] / sums[:, 1]).std()),
        "nodes_a_step": sum(each.nodes for each in replayed) / steps,
        "steps": steps,
    }


def measured(drafter: Drafter, target: Target, corpus: Corpus, only: list[str]) -> dict[str, Any]:
    """The figures of one drafter: in all settings, or in those of the names `only`."""
    columns = Columns(torch.arange(1), len(target.head), sampled=0)
    loss = DrafterLoss(drafter, target.embeddings, target.head, columns, LossWeights())
    texts = list(texts_of(corpus))
    found: dict[str, Any] = {"greedy_chain": asdict(measure(loss, corpus, torch.device("cpu")))}
    if drafter.config.feeds_tokens:
        for name, setting in _chosen(EAGLE_SETTINGS, only).items():
            found[name] = figures(
                replay_eagle(
                    *(texts, drafter, target.embeddings, target.head), width=WIDTH, **setting
                )
            )
        return found
    chosen = {
        name: LyannaOptions(model="", width=WIDTH, **options)
        for name, options in _chosen(SETTINGS, only).items()
    }
    most = max(options.steps for options in chosen.values())
    replay = LyannaReplay(texts, drafter, target.embeddings, target.head, most)
    for name, options in chosen.items():
        found[name] = figures(replay.run(options))
    return found


def _chosen(settings: dict[str, Any], only: list[str]) -> dict[str, Any]:
    return {name: settings[name] for name in only or settings if name in settings}


def main(
    target: Path,
    prompts: Annotated[list[Path], typer.Option(help="Spec-Bench's format; even lines are used.")],
    drafter: Annotated[list[str], typer.Option(help="NAME=FOLDER; may be repeated.")],
    output: Annotated[Path, typer.Option(help="JSON.")],
    work: Annotated[Path, typer.Option(help="For the answers and their features.")],
    max_new_tokens: int = 96,
    only: Annotated[list[str] | None, typer.Option(help="A setting; may be repeated.")] = None,
) -> None:
    """Measure drafters."""
    if unknown := [name for name in only or () if name not in SETTINGS]:
        raise typer.BadParameter(f"--only {unknown[0]!r} is not one of: {', '.join(SETTINGS)}")
    from transformers import AutoModelForCausalLM

    work.mkdir(parents=True, exist_ok=True)
    samples = answered(target, prompts, work, max_new_tokens)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    cache = Features(work / "features", samples, fingerprint(target))
    cache.compute(model, torch.device("cpu"), lambda done, total: None)
    parts = Target(
        target,
        model.get_input_embeddings().weight.detach(),
        model.get_output_embeddings().weight.detach(),
    )
    corpus = Corpus.whole(samples, cache)
    report: dict[str, Any] = {
        "target": target.name,
        "prompts": [file.name for file in prompts],
        "answers": len(list(texts_of(corpus))),
        "answer_tokens": sum(int(sample.answer.sum()) for sample in samples),
        "max_new_tokens": max_new_tokens,
        "width": WIDTH,
        "drafters": {},
    }
    for pair in drafter:
        name, _, folder = pair.partition("=")
        report["drafters"][name] = measured(load(Path(folder), target), parts, corpus, only or [])
        output.write_text(json.dumps(report, indent=2) + "\n")
        typer.echo(f"{name}: {json.dumps(report['drafters'][name])}")


if __name__ == "__main__":
    typer.run(main)
