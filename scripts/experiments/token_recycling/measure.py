"""Takes several settings through a workload side by side, so that they share the target's work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from scripts.experiments.common import Replayed
from scripts.experiments.token_recycling.known_target import TOP, Known, KnownTarget
from scripts.experiments.token_recycling.recycling_variants import (
    SETTINGS,
    Order,
    Setting,
    TableDrafter,
)
from scripts.experiments.token_recycling.replay import Decoding, Text, decode
from scripts.experiments.token_recycling.workloads import Wave


@dataclass
class Measured:
    """A setting that is being measured.

    Attributes:
        name: Name of the setting.
        num_draft_tokens: Number of draft tokens of a tree.
        setting: The setting.
        drafter: The setting's drafter.
        found: For each wave, the counts of each chat's requests, by the chat's index.
    """

    name: str
    num_draft_tokens: int
    setting: Setting
    drafter: TableDrafter
    found: list[dict[int, list[Replayed]]] = field(default_factory=list)


class Bench:
    """Replays the decoding of a workload in any setting.

    Args:
        target: The target.
        waves: The workload.
        context: Greatest number of tokens of a request.
        batch: Number of requests that decode side by side.
        matrix: The primed matrix, int32 `[V, 8]`, for settings that have one.
        foreign: Tokens for the memory of each drafter before the first request.
    """

    def __init__(
        self,
        target: KnownTarget,
        waves: Sequence[Wave],
        *,
        context: int,
        batch: int = 1,
        matrix: Tensor | None = None,
        foreign: Sequence[int] = (),
    ) -> None:
        self.foreign = foreign
        self._target = target
        self._waves = waves
        self._context = context
        self._batch = batch
        self._matrix = matrix

    def begin(self, name: str, num_draft_tokens: int) -> Measured:
        """Start measuring a setting.

        Raises:
            ValueError: There is foreign text, and the drafter has no memory.
        """
        setting = SETTINGS[name]
        drafter = setting.make(self._target.vocab, num_draft_tokens)
        drafter.allocate(self._batch, self._context)
        measured = Measured(name, num_draft_tokens, setting, drafter)
        self._empty(measured)
        return measured

    def _empty(self, measured: Measured) -> None:
        """Let a drafter start from the primed matrix and the foreign text alone."""
        drafter = measured.drafter
        drafter.reset()
        if measured.setting.primed and self._matrix is not None:
            matrix = drafter.tables.matrix
            matrix.copy_(self._matrix[:, : matrix.shape[1]])
        if self.foreign:
            drafter.remember(torch.tensor(self.foreign, dtype=torch.int32))

    def replay(self, settings: Sequence[Measured], order: Order) -> Iterator[str]:
        """Replay all waves, and report progress from time to time."""
        for number, wave in enumerate(self._waves, 1):
            for each in settings:
                each.found.append({})
            for done, chats in enumerate(self._episodes(wave, order), 1):
                self._settle(chats, settings)
                yield f"wave {number}: {done * len(chats)} requests of {_size(wave)}"

    def _episodes(self, wave: Wave, order: Order) -> Iterator[list[list[Text]]]:
        """What all settings finish before the next begins: one request, or in a batch a wave."""
        chats = [wave[number].texts for number in ordered(wave, order)]
        if self._batch > 1:
            yield chats
            return
        for chat in chats:
            for text in chat:
                yield [[text]]

    def _settle(self, chats: list[list[Text]], settings: Sequence[Measured]) -> None:
        """Replay some requests in all settings; the target evaluates their nodes together."""
        opened: dict[Text, Known] = {}

        def known_of(text: Text) -> Known:
            if text not in opened:
                opened[text] = self._target.begin(text.prompt, text.answer if text.given else None)
            return opened[text]

        running: list[tuple[Measured, Decoding]] = []
        for each in settings:
            if each.setting.cold:
                self._empty(each)
            decoding = decode(
                each.drafter, each.setting, chats, known_of, self._target.vocab, self._batch
            )
            running.append((each, decoding))
        while running:
            wanted: dict[Text, list[list[int]]] = {}
            unfinished = []
            for each, decoding in running:
                try:
                    for text, nodes in next(decoding):
                        wanted.setdefault(text, []).append(nodes)
                    unfinished.append((each, decoding))
                except StopIteration as done:
                    for chat, counts in done.value:
                        each.found[-1].setdefault(chat, []).append(counts)
            for text, trees in wanted.items():
                self._target.learn(opened[text], trees)
            running = unfinished
        for known in opened.values():
            self._target.finish(known)


def ordered(wave: Wave, order: Order) -> list[int]:
    """The indices of a wave's chats in the given order."""
    numbers = list(range(len(wave)))
    if order == "category":
        names = list(dict.fromkeys(chat.category for chat in wave))
        numbers.sort(key=lambda number: names.index(wave[number].category))
    elif order == "shuffled":
        random.Random(0).shuffle(numbers)
    return numbers


def _size(wave: Wave) -> int:
    return sum(len(chat.texts) for chat in wave)


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
