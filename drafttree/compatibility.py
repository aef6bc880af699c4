"""What works with what: features of engines and models, by engine and kind of drafter.

The checks at start, `drafttree doctor` and the table in the documentation read it from
`compatibility.toml`. No engine is needed for that.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, get_args

Engine = Literal["vllm", "sglang"]
State = Literal["tested", "untested", "chains", "plain", "refused", "none"]

ENGINES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
"""The engines and their names."""

ANY_KIND = "all"
"""Stands for the kinds of drafter that a feature does not name."""


@dataclass(frozen=True)
class Cell:
    """How an engine serves a feature with a kind of drafter.

    Attributes:
        state: Whether it is tested, served but untested, served with chains of draft tokens in
            place of trees ("chains"), served without drafts ("plain"), refused, or "none" where the
            engine has no such thing.
        test: The test of what is tested, `FILE::NAME` in `tests/engines`. Chains may have none.
    """

    state: State
    test: str = ""


@dataclass(frozen=True)
class Feature:
    """A feature of an engine or a model.

    Attributes:
        title: Its name in a table.
        cells: By engine, and then by kind of drafter or `ANY_KIND`.
    """

    title: str
    cells: Mapping[str, Mapping[str, Cell]]

    def cell(self, engine: Engine, kind: str) -> Cell:
        """How an engine serves the feature with a kind of drafter (`DrafterKind.name`)."""
        by_kind = self.cells[engine]
        return by_kind.get(kind, by_kind[ANY_KIND])


@functools.cache
def features() -> Mapping[str, Feature]:
    """All features by name, in the order of the file."""
    text = files(__package__).joinpath("compatibility.toml").read_text()
    return {
        name: Feature(
            entry["title"],
            {
                engine: {kind: _cell(value) for kind, value in entry[engine].items()}
                for engine in ENGINES
            },
        )
        for name, entry in tomllib.loads(text).items()
    }


def _cell(text: str) -> Cell:
    state, _, test = text.partition(": ")
    may_name, must_name = state in ("tested", "chains"), state == "tested"
    if state not in get_args(State) or not must_name <= bool(test) <= may_name:
        raise ValueError(f"compatibility.toml: {text!r} is not a state")
    return Cell(state, test)  # type: ignore[arg-type]


def is_refused(engine: Engine, kind: str, feature: str) -> bool:
    """Whether an engine refuses a feature with a kind of drafter.

    Raises:
        KeyError: There is no such feature.
    """
    return features()[feature].cell(engine, kind).state == "refused"


def is_in_chains(engine: Engine, kind: str, feature: str) -> bool:
    """Whether an engine serves a feature with chains of draft tokens instead of trees.

    Raises:
        KeyError: There is no such feature.
    """
    return features()[feature].cell(engine, kind).state == "chains"


def refused(engine: Engine, kind: str) -> list[str]:
    """The titles of all features that an engine refuses with a kind of drafter."""
    return [each.title for name, each in features().items() if is_refused(engine, kind, name)]
