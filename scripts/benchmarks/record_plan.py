"""The runs that the figures of record consist of, and the settings that they share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENGINES = ("vllm", "sglang")
METHODS = ("ngram", "suffix", "token-recycling")
CONCURRENCIES = (1, 8, 32)
WAVES = 2
"""The first wave finds nothing learned; the second asks the same prompts again."""


@dataclass(frozen=True)
class Cell:
    """A run of `drafttree bench`, which measures plain decoding too.

    Attributes:
        engine: `vllm` or `sglang`.
        concurrency: Prompts answered together.
        method: What is measured against plain decoding.
    """

    engine: str
    concurrency: int
    method: str

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.method}-batch-{self.concurrency}"

    @property
    def file(self) -> str:
        """The name of its report."""
        return f"{self.name}.json"


@dataclass(frozen=True)
class Settings:
    """What all runs in a folder share.

    Attributes:
        model: The target's folder.
        prompts: A file of prompts; None for those of the package.
        limit: Number of prompts; None for all.
        dtype: The engines' data type.
        max_new_tokens: Greatest number of tokens of an answer.
        repeat: Repetitions of a run.
    """

    model: str
    prompts: str | None
    limit: int | None
    dtype: str
    max_new_tokens: int
    repeat: int

    def arguments(self, cell: Cell, output: Path) -> list[str]:
        """The arguments of `drafttree bench` for a cell."""
        given = {
            "--engine": cell.engine,
            "--method": cell.method,
            "--batch-size": cell.concurrency,
            "--waves": WAVES,
            "--model": self.model,
            "--prompts": self.prompts,
            "--limit": self.limit,
            "--dtype": self.dtype,
            "--max-new-tokens": self.max_new_tokens,
            "--repeat": self.repeat,
            "--output": output,
        }
        return [
            text
            for name, value in given.items()
            if value is not None
            for text in (name, str(value))
        ]

    def shared(self) -> dict[str, Any]:
        """The settings as a folder keeps them: files by their names, as paths differ by machine."""
        prompts = None if self.prompts is None else Path(self.prompts).name
        return asdict(self) | {"model": Path(self.model).name, "prompts": prompts}


def cells(
    engines: Sequence[str], concurrencies: Sequence[int], methods: Sequence[str]
) -> Iterator[Cell]:
    """All runs in their order: the methods of one engine and concurrency follow each other, so that
    what is compared was measured under similar conditions."""
    for engine in engines:
        for concurrency in concurrencies:
            for method in methods:
                # The bench refuses these two, which are vLLM's own.
                if engine == "vllm" or method not in ("ngram", "suffix"):
                    yield Cell(engine, concurrency, method)


def take_settings(folder: Path, settings: Settings) -> None:
    """Write the settings into a new folder; in one with runs they must be the same.

    Raises:
        ValueError: The folder holds runs with other settings.
    """
    file = folder / "settings.json"
    if file.exists():
        before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for name, value in settings.shared().items():
            if before.get(name) != value:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{folder} holds runs with {option} {before.get(name)}, not {value}: give "
                    "another folder, or the same settings"
                )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings.shared(), indent=2) + "\n", encoding="utf-8")


def reports(folder: Path, planned: Iterable[Cell]) -> list[dict[str, Any]]:
    """The reports of the cells that a folder has, in their order."""
    return [report for cell in planned if (report := finished(folder, cell)) is not None]


def finished(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """The report of a cell, if it has been run."""
    file = folder / cell.file
    if not file.exists():
        return None
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report
