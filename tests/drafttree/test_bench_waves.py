"""Several waves of the same prompts in one repetition of the bench, without an engine."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from bench_parts import NullObserver, WordChat
from rich.console import Console

from drafttree.bench.methods import resolve_method
from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import Generation, Request
from drafttree.bench.report import Repetition, Verdict
from drafttree.bench.run import BenchSettings, Pair
from drafttree.bench.table import waves_table
from drafttree.bench.waves import wave_figures


def answer(tokens: list[int], steps: int, seconds: float) -> Generation:
    """An answer whose first token comes from the prefill."""
    return Generation(
        prompt_tokens=10,
        token_ids=tokens,
        steps=steps,
        step_tokens=len(tokens) - 1,
        seconds=seconds,
    )


def test_figures_by_wave() -> None:
    """Two prompts, asked twice; in the second wave the method decodes each in one step."""
    plain = [[answer([1, 2, 3], 2, 3.0)] for _ in range(4)]
    method = [[answer([1, 2, 3], steps, 1.5 * steps)] for steps in (2, 2, 1, 1)]
    repetitions = [Repetition(plain, method)]
    counters = [
        {"steps": 4, "drafted_steps": 2, "draft_tokens": 6},
        {"steps": 6, "drafted_steps": 4, "draft_tokens": 20},
    ]
    verdicts: list[Verdict] = ["identical", "tie", "identical", "identical"]
    first, second = wave_figures(repetitions, verdicts, ["qa", "math"], counters)
    assert [first["mean_accepted_tokens"], second["mean_accepted_tokens"]] == [1.0, 2.0]
    assert [first["speedup"], second["speedup"]] == [1.0, 2.0]
    assert [first["ties"], second["ties"]] == [1, 0]
    for wave, speedup, ties in ((first, 1.0, 1), (second, 2.0, 0)):
        assert list(wave["per_category"]) == ["math", "qa"]
        math, qa = wave["per_category"].values()
        assert (math["prompts"], math["speedup"], math["ties"]) == (1, speedup, ties)
        assert (qa["prompts"], qa["speedup"], qa["ties"]) == (1, speedup, 0)
    assert [first["drafted_share"], second["drafted_share"]] == [0.5, 1.0]
    assert [first["drafts_per_step"], second["drafts_per_step"]] == [3.0, 7.0]
    console = Console(width=80, record=True, file=StringIO())
    console.print(waves_table({"waves": [first, second]}, explain=True))
    text = console.export_text()
    assert all(cell in text for cell in ("/step", "100%", "7.0", "2.00"))
    alone = wave_figures(repetitions, verdicts, ["qa", "math"], [])
    assert waves_table({"waves": alone}, explain=True).row_count == 2
    assert "drafted_share" not in alone[0]


class RecordedEngine:
    """An engine side that answers every request alike and records what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset(self, tables: bool) -> None:
        self.calls.append(f"reset {tables}")

    def generate(self, requests: list[Request]) -> list[Generation]:
        self.calls.append(f"generate {len(requests)}")
        return [answer([5, 6], 1, 1.0) for _ in requests]

    def counters(self) -> dict[str, int]:
        return {"steps": sum(call.startswith("generate") for call in self.calls)}


@pytest.mark.parametrize(
    ("name", "learns"), [("token-recycling", True), ("suffix", True), ("ngram", False)]
)
def test_memory_is_emptied_before_a_repetition_and_kept_between_waves(
    name: str, learns: bool
) -> None:
    prompts = [Prompt(i, "qa", ("a",)) for i in range(3)]
    method = resolve_method(name, {})
    settings = BenchSettings(
        "vllm", method, Path("model"), prompts, batch_size=2, waves=2, repeat=2
    )
    plain, side = RecordedEngine(), RecordedEngine()
    engines: Any = (WordChat(), 128, plain, side)
    pair = Pair(settings, NullObserver(), *engines)
    for number in range(2):
        repetition = pair.repetition(number)
        assert len(repetition.plain) == len(repetition.method) == 6
    waves = ["generate 2", "generate 1"] * 2
    assert side.calls == [f"reset {learns}", *waves] * 2
    assert plain.calls == ["reset False", *waves] * 2
    assert [each["steps"] for each in pair.counters] == ([2, 4] if method.drafts_trees else [])
