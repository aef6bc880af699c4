"""Figures of several methods beside one plain engine: what fails is shown, and the rest goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import pytest
import typer
from typer.testing import CliRunner

from drafttree.bench.errors import EngineError
from drafttree.bench.protocol import EngineInfo, EngineSpec, Generation, Request

started: list[str] = []


class FakeEngine:
    """An engine that answers every request alike; some do not start, and some fail in a batch."""

    def __init__(self, engine: str, label: str, spec: EngineSpec) -> None:
        assert spec.batch_size == 2
        assert spec.kv_cache_bytes == 6 << 30
        self.label = label
        self.ready = False

    def wait_until_ready(self) -> EngineInfo:
        if self.label == "ngram,prompt_lookup_max=3":
            raise EngineError("no memory")
        if not self.ready:
            started.append(self.label)
        self.ready = True
        return EngineInfo("0.32.0", "cuda", "v2")

    def generate(self, requests: list[Request]) -> list[Generation]:
        if self.label == "ngram,prompt_lookup_max=4" and len(requests) == 2:
            raise EngineError("out of memory")
        return [Generation(9, [5, 6, 7], 2, 2, 1.0) for _ in requests]

    def reset(self, tables: bool) -> None: ...

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None: ...


class WordChat:
    """A chat format in which every turn is one token."""

    def __init__(self, model: Path) -> None: ...

    def render(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        return [1] * len(turns)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def measure(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(figures.main)
    started.clear()
    monkeypatch.setattr(figures, "EngineProcess", FakeEngine)
    monkeypatch.setattr(figures, "Chat", WordChat)
    monkeypatch.setattr(figures, "usable_context", lambda model, tokens: 512)
    return CliRunner().invoke(app, [str(out / "model"), str(out), *arguments])


def test_what_fails_is_shown_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ["ngram", "ngram,prompt_lookup_max=3", "ngram,prompt_lookup_max=4"]
    sizes = ["--batch-size", "1", "--batch-size", "2"]
    result = measure(monkeypatch, tmp_path, *methods, *sizes, "--limit", "1")
    assert result.exit_code == 1
    assert started == ["plain", methods[0], methods[2]]
    assert f"{methods[1]} failed: EngineError: no memory" in result.output
    assert f"batch 2, {methods[2]} failed: EngineError: out of memory" in result.output
    reports = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    measured = {"ngram-batch-1", "ngram-batch-2", "ngram-prompt_lookup_max=4-batch-1"}
    assert reports.keys() == {f"{name}.json" for name in measured}
    assert [reports[f"ngram-batch-{n}.json"]["prompts"] for n in (1, 2)] == [1, 2]
    assert reports["ngram-batch-2.json"]["batch_size"] == 2
    assert reports["ngram-batch-2.json"]["device"] == "cuda"
    assert reports["ngram-batch-2.json"]["speedup"] == 1.0


def test_nothing_is_measured_without_the_plain_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stack: object, label: str, spec: object) -> None:
        raise EngineError("no GPU")

    monkeypatch.setattr(figures, "start", fail)
    result = measure(monkeypatch, tmp_path, "ngram", "--batch-size", "2")
    assert result.exit_code == 1
    assert "the plain engine failed: EngineError: no GPU" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["oracle"], "unknown method"),
        (["ngram,nodes"], "expected KEY=VALUE"),
        (["ngram", "--batch-size", "64"], "there are 40 prompts"),
    ],
)
def test_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    result = measure(monkeypatch, tmp_path, *arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())
    assert not started


def test_names_of_files_have_no_slashes() -> None:
    assert figures.file_name("rsd,model=/a/b", 4) == "rsd-model=-a-b-batch-4.json"
