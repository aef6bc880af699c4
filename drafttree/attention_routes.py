"""Where an engine's flash attention reads what comes before a step's rows.

`attention_routes.toml` says from how many tokens on that is faster than drafttree's own kernel.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

FILE = "attention_routes.toml"
NEVER = -1
"""In place of a number of tokens."""


@dataclass(frozen=True)
class Routes:
    """The table of one kind of GPU and one head size.

    Attributes:
        architecture: The kind of GPU, such as "sm_90" for compute capability 9.0.
        head_size: Size of the attention heads.
        source: Where the numbers come from; "estimated" if nothing was measured.
        requests: Numbers of requests, ascending.
        rows: Numbers of rows of a request, ascending.
        contexts: For each number of requests and of rows, from how many tokens before the rows on
            flash attention is faster, or `NEVER`.
    """

    architecture: str
    head_size: int
    source: str
    requests: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check the shapes.

        Raises:
            ValueError: They do not fit.
        """
        lengths = [len(line) for line in self.contexts]
        ascending = all([*each] == sorted({*each}) for each in (self.requests, self.rows))
        if not ascending or lengths != [len(self.rows)] * len(self.requests):
            raise ValueError(
                f"{FILE}: {self.architecture} with heads of {self.head_size} has contexts of "
                f"{lengths} for requests {[*self.requests]} and rows {[*self.rows]}"
            )

    def takes_flash(self, requests: int, rows: int, context: int) -> bool:
        """Whether flash attention reads the tokens before the rows.

        Between two entries the one with fewer requests and fewer rows counts. No entry is for less
        than the least.

        Args:
            requests: Number of requests of the step.
            rows: Greatest number of rows of a request.
            context: Greatest number of tokens before a request's rows.
        """
        line = bisect_right(self.requests, requests) - 1
        column = bisect_right(self.rows, rows) - 1
        if line < 0 or column < 0:
            return False
        least = self.contexts[line][column]
        return least != NEVER and context >= least


@cache
def all_routes() -> tuple[Routes, ...]:
    """All tables of `attention_routes.toml`.

    Raises:
        ValueError: A table's shapes do not fit.
    """
    return parse(files(__package__).joinpath(FILE).read_text())


def parse(text: str) -> tuple[Routes, ...]:
    """The tables of a text in the format of `attention_routes.toml`.

    Raises:
        ValueError: A table's shapes do not fit.
    """
    return tuple(
        Routes(
            each["architecture"],
            each["head_size"],
            each["source"],
            tuple(each["requests"]),
            tuple(each["rows"]),
            tuple(map(tuple, each["contexts"])),
        )
        for each in tomllib.loads(text)["routes"]
    )


def routes_of(architecture: str, head_size: int) -> Routes | None:
    """The table of a kind of GPU for the least head size that is not below one.

    Returns:
        The table; None if there is none.
    """
    fitting = [
        each
        for each in all_routes()
        if each.architecture == architecture and each.head_size >= head_size
    ]
    return min(fitting, key=lambda each: each.head_size, default=None)
