"""Measure how many tokens per step each part of Token Recycling contributes, without an engine.

    python -m scripts.experiments.token_recycling.ablate_recycling MODEL \\
        --file spec_bench_dev.jsonl --limit 40 --nodes 15 --nodes 80 --work WORK \\
        --output results/recycling_ablation.json

Each setting decodes all turns of all chats greedily. The package's own drafters draft and learn
from the logits of a float32 target at all nodes of their trees. `recycling_variants.py` lists the
settings by name; `--primed` adds those that start from a primed matrix, such as `dynamic primed`.
`--kind` chooses another workload of `workloads.py`, `--waves 2` replays it again with what was
learned, and `--batch 8` decodes eight requests side by side through one drafter.

All settings go through the chats side by side, and the target's outputs are cached in WORK, so an
interrupted run catches up quickly, and another setting only evaluates nodes that no earlier setting
needed. A setting is skipped if OUTPUT already has its results for all chats under the same
conditions. `report_recycling.py` and `report_workloads.py` tabulate and plot the results. Needs
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from drafttree.bench.context import model_context
from drafttree.bench.machine import processor_name
from scripts.experiments.token_recycling.foreign_text import read_tokens
from scripts.experiments.token_recycling.known_target import KnownTarget
from scripts.experiments.token_recycling.measure import Bench, Measured, read_primed
from scripts.experiments.token_recycling.peers import (
    NGRAM_TOKENS,
    SUFFIX_DEPTH,
    replay_ngram,
    replay_suffix,
)
from scripts.experiments.token_recycling.recycling_variants import SETTINGS
from scripts.experiments.token_recycling.replay_results import Results, with_errors
from scripts.experiments.token_recycling.workloads import KINDS, load_waves


def main(
    model: Path,
    file: Annotated[
        Path, typer.Option(help="Prompts in Spec-Bench's format, or the tasks of edit and agent.")
    ],
    output: Annotated[Path, typer.Option(help="JSON; an existing file is continued.")],
    work: Annotated[Path, typer.Option(help="Folder of the cache, shared by all settings.")],
    kind: Annotated[str, typer.Option(help=f"The workload: {', '.join(KINDS)}.")] = "prompts",
    waves: Annotated[int, typer.Option(min=1, help="How often the chats are replayed.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode side by side.")] = 1,
    limit: int = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per greedy answer.")] = 96,
    nodes: Annotated[
        list[int] | None, typer.Option(help="May be repeated. Default: 15 and 80.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A setting; may be repeated.")] = None,
    primed: Annotated[
        Path | None, typer.Option(help="A safetensors file with `matrix`, int32 [V, 8].")
    ] = None,
    foreign: Annotated[
        list[Path] | None,
        typer.Option(help="Text for the drafter's memory: a file, or a folder of *.py files."),
    ] = None,
    foreign_tokens: Annotated[int, typer.Option(help="Tokens of it that are used.")] = 1_000_000,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also replay n-gram speculation and suffix decoding.")
    ] = False,
) -> None:
    """Measure settings."""
    if kind not in KINDS:
        raise typer.BadParameter(f"--kind {kind!r} is not one of: {', '.join(KINDS)}")
    names = only or [name for name, each in SETTINGS.items() if primed or not each.primed]
    if unknown := [name for name in names if name not in SETTINGS]:
        raise typer.BadParameter(f"--only {unknown[0]!r} is not one of: {', '.join(SETTINGS)}")
    if primed is None and (lost := [name for name in names if SETTINGS[name].primed]):
        raise typer.BadParameter(f"--only {lost[0]!r} needs --primed")
    if batch > 1 and (cold := [name for name in names if SETTINGS[name].cold]):
        raise typer.BadParameter(f"--batch {batch}: {cold[0]!r} forgets before each request")
    target = KnownTarget(model, work, max_new_tokens)
    loaded = load_waves(kind, file, limit, waves, model, target, max_new_tokens)
    categories = [chat.category for chat in loaded[0]]
    context = max(
        model_context(model),
        *(len(text.prompt) + len(text.answer) for chat in loaded[0] for text in chat.texts),
    )
    bench = Bench(
        target,
        loaded,
        context=context,
        batch=batch,
        matrix=read_primed(primed, target.vocab) if primed else None,
        foreign=read_tokens(foreign, model, foreign_tokens) if foreign else [],
    )
    results = Results(output)
    common = {
        "model": model.resolve().name,
        "dtype": "float32",
        "prompts": file.name,
        "limit": len(loaded[0]),
        "max_new_tokens": max_new_tokens,
        "processor": processor_name(),
        "kind": kind,
    }

    def conditions(name: str, count: int, wave: int) -> dict[str, Any]:
        return {
            "setting": name,
            "nodes": count,
            **common,
            "start": "cold" if SETTINGS[name].cold else "hot",
            "primed": primed.name if primed and SETTINGS[name].primed else None,
            "wave": wave,
            "batch": batch,
            "foreign": len(bench.foreign),
        }

    def keep(each: Measured) -> None:
        for wave, found in enumerate(each.found, 1):
            under = conditions(each.name, each.num_draft_tokens, wave)
            results.put(under, with_errors(found, categories))

    def peer(name: str, count: int, found: list[Any]) -> None:
        for wave, counts in enumerate(found, 1):
            under = {
                "setting": name,
                "nodes": count,
                **common,
                **{"start": "hot", "primed": None, "wave": wave, "batch": 1, "foreign": 0},
            }
            results.put(under, with_errors(counts, categories))

    if peers:
        peer("n-gram", NGRAM_TOKENS, replay_ngram(loaded, context))
        peer("suffix", SUFFIX_DEPTH, replay_suffix(loaded))
        results.write()
    chosen = [
        (name, count)
        for count in nodes or (15, 80)
        for name in names
        if SETTINGS[name].fits(count)
        and results.prompts_done(conditions(name, count, len(loaded))) < len(categories)
    ]
    for order in dict.fromkeys(SETTINGS[name].order for name, _ in chosen):
        settings = [bench.begin(*each) for each in chosen if SETTINGS[each[0]].order == order]
        for progress in bench.replay(settings, order):
            for each in settings:
                keep(each)
            results.write()
            typer.echo(progress)
        for each in settings:
            for wave, counts in enumerate(each.found, 1):
                found = with_errors(counts, categories)
                typer.echo(
                    f"{each.name}, {each.num_draft_tokens} draft tokens, wave {wave}: "
                    f"{found['mean_accepted_tokens']:.3f} ± {found['standard_error']:.3f} "
                    f"({found['nodes_a_step']:.1f} draft tokens per step)"
                )


if __name__ == "__main__":
    typer.run(main)
