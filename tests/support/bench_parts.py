"""Stand-ins for the parts of a bench run beside its engines."""

from __future__ import annotations

from collections.abc import Sequence

from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import Generation


class WordChat:
    """A chat format in which every turn is one token."""

    def render(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        return [1] * len(turns)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class NullObserver:
    """Ignores the progress of a run."""

    def status(self, text: str) -> None: ...

    def advance(self) -> None: ...

    def answered(self, *answer: Prompt | list[Generation]) -> None: ...
