"""Measure the acceptance of drafters of one target on prompts that none was trained on.

    .venv-vllm/bin/python -m scripts.experiments.lyanna.measure_lyanna \\
        TARGET --prompts spec_bench_dev.jsonl --drafter lyanna=DIR --drafter eagle=DIR \\
        --work WORK --output results/lyanna_acceptance.json

The target answers every second line of the prompts greedily, starting with the second. Decoding is
then replayed over these answers with every drafter and every setting. A drafter of the variant
`eagle` drafts in EAGLE's way. Standard errors are bootstrapped over the answers. Needs vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from drafttree.model_files import first_rows_fingerprint
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.model import LyannaModel
from lyanna_plugin.training.acceptance import measure
from lyanna_plugin.training.dataset import Sample, encode, read_conversations
from lyanna_plugin.training.features import Corpus, Features
from lyanna_plugin.training.loss import Columns, DrafterLoss, LossWeights
from lyanna_plugin.training.regenerate import regenerate
from scripts.experiments.common import figures
from scripts.experiments.lyanna.eagle_style import replay_eagle
from scripts.experiments.lyanna.lyanna_replay import LyannaReplay, Text
from scripts.experiments.lyanna.variants import EagleStyle, load_variant

_CONTEXT = 2048

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
    **{f"{n} nodes": {"depth": 3, "num_draft_tokens": n} for n in (4, 6, 8, 12, 16, 24)},
    "depth 5, 12 nodes": {"depth": 5, "num_draft_tokens": 12},
}
WIDTH = 4


@dataclass(frozen=True)
class Target:
    """The parts of the target that drafters use.

    Attributes:
        folder: Folder of the target.
        embeddings: `float32 [V, d]`, the target's embeddings.
        head: `float32 [V, d]`, the target's output head.
    """

    folder: Path
    embeddings: Tensor
    head: Tensor


def answered(folder: Path, prompts: list[Path], work: Path, max_tokens: int) -> list[Sample]:
    """Every second prompt with the target's greedy answers."""
    from transformers import AutoTokenizer

    asked = [chat for file in prompts for chat in list(read_conversations(file))[1::2]]
    file = regenerate(asked, folder, max_tokens, _CONTEXT, work, lambda done: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = (encode(chat, tokenizer, _CONTEXT) for chat in read_conversations(file))
    return [sample for sample in found if sample is not None]


def texts_of(corpus: Corpus) -> Iterator[Text]:
    """One text for each answer, with everything before it as the prompt."""
    for index, sample in enumerate(corpus.samples):
        hidden = corpus.features(index)[0].float()
        edges = torch.diff(sample.answer.int(), prepend=torch.zeros(1), append=torch.zeros(1))
        starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if end - start > 1:
                yield Text(sample.tokens[:end].long(), hidden[:end], start)


def measured(
    drafter: LyannaModel, target: Target, corpus: Corpus, only: list[str]
) -> dict[str, Any]:
    """The figures of one drafter in the settings in `only`, or in all if `only` is empty."""
    columns = Columns(torch.arange(1), len(target.head), sampled=0)
    loss = DrafterLoss(drafter, target.embeddings, target.head, columns, LossWeights())
    texts = list(texts_of(corpus))
    found: dict[str, Any] = {"greedy_chain": asdict(measure(loss, corpus, torch.device("cpu")))}
    if isinstance(drafter, EagleStyle):
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
    steps = max(options.steps for options in chosen.values())
    replay = LyannaReplay(texts, drafter, target.embeddings, target.head, steps)
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
    work: Annotated[Path, typer.Option(help="Folder for the answers and their features.")],
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
    fingerprint = first_rows_fingerprint(target)
    cache = Features(work / "features", samples, fingerprint, torch.float32)
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
        report["drafters"][name] = measured(
            load_variant(Path(folder), target), parts, corpus, only or []
        )
        output.write_text(json.dumps(report, indent=2) + "\n")
        typer.echo(f"{name}: {json.dumps(report['drafters'][name])}")


if __name__ == "__main__":
    typer.run(main)
