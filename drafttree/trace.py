"""Records the steps of one request: its trees, what became of them, and where time went.

Hosts record while they are asked to, by classes of their own, so that a step that is not recorded
does nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from drafttree.grammar.forced_tokens import SOURCES
from drafttree.tree import DraftTree, Verified

Part = Literal["draft", "forward", "verify", "rest"]
"""What a step spends time on."""


class StepSeconds(BaseModel):
    """Where the time of a step went, in seconds.

    Attributes:
        draft: Drafting the step's tree.
        forward: The target's forward over it, with the output head.
        verify: Choosing the tokens to emit, and all that follows from them: moving KV and learning.
        rest: Everything else, such as the engine's scheduler.
    """

    model_config = ConfigDict(extra="forbid")

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        """The step's duration in seconds."""
        return self.draft + self.forward + self.verify + self.rest


class TracedToken(BaseModel):
    """A token.

    Attributes:
        token: Its id.
        text: What it adds to the text of the tokens before it; empty until it is decoded.
    """

    model_config = ConfigDict(extra="forbid")

    token: int
    text: str = ""


class TracedNode(TracedToken):
    """A node of a tree as it was verified.

    Attributes:
        parent: Place of its parent in `TracedStep.nodes`; -1 for the root.
        source: Where the token came from; empty for the root.
        accepted: Whether the token is in the output; true for the root.
    """

    parent: int
    source: str = ""
    accepted: bool = False


class TracedStep(BaseModel):
    """A decode step, from the proposal of its tree to the next one.

    Attributes:
        nodes: The tree in breadth-first order, the root first. The accepted nodes are a path.
        bonus: The token that the target itself put after the accepted path.
        seconds: Where the time went.
    """

    model_config = ConfigDict(extra="forbid")

    nodes: list[TracedNode] = Field(min_length=1)
    bonus: TracedToken
    seconds: StepSeconds

    @field_validator("nodes")
    @classmethod
    def _breadth_first(cls, nodes: list[TracedNode]) -> list[TracedNode]:
        for place, node in enumerate(nodes):
            if not (0 <= node.parent < place if place else node.parent == -1):
                raise ValueError(f"node {place} has parent {node.parent}")
        return nodes

    @property
    def emitted(self) -> list[TracedToken]:
        """The tokens that the step emitted, the bonus token last."""
        return [*(node for node in self.nodes[1:] if node.accepted), self.bonus]

    @property
    def tried(self) -> list[TracedNode]:
        """The draft tokens whose parent was accepted, as `Drafter.acceptance` counts them."""
        return [node for node in self.nodes[1:] if self.nodes[node.parent].accepted]


class StepTracer:
    """Records the steps of one request that runs alone.

    Args:
        device: The target's device, which is waited for whenever time is taken.
        clock: Returns the time in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self.steps: list[TracedStep] = []
        self.prompt_seconds = StepSeconds()
        self._device = device
        self._clock = clock
        self._part: Part | None = "rest"
        self._began = clock()
        self._seconds = StepSeconds()

    def enter(self, part: Part | None) -> None:
        """From now on, time belongs to this part of the step; with None, to nothing."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = self._clock()
        if self._part is not None:
            spent = getattr(self._seconds, self._part) + now - self._began
            setattr(self._seconds, self._part, spent)
        self._part, self._began = part, now

    def begin(self, part: Part = "rest") -> None:
        """A step begins, and the one before it ends."""
        self.enter(part)
        self._seconds = StepSeconds()

    def prompt_read(self) -> None:
        """The step that is recorded has read the prompt, or a part of it."""
        self.prompt_seconds = self._seconds

    def verified(self, trees: DraftTree, verified: Verified, sources: Sequence[str]) -> None:
        """Note the outcome of the step; waits for the device.

        Args:
            trees: The tree as verified, B = 1.
            verified: The outcome.
            sources: Where the token of each column came from.

        Raises:
            ValueError: There is not exactly one request.
        """
        self.enter(None)
        if len(trees.tokens) != 1:
            raise ValueError(f"{len(trees.tokens)} requests run together: trace one alone")
        tokens, parents = trees.tokens[0].tolist(), trees.parents[0].tolist()
        path = {column for column in verified.path[0].tolist() if column >= 0}
        nodes: list[TracedNode] = []
        places: dict[int, int] = {-1: -1}
        for column, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if token < 0:
                continue
            places[column] = len(nodes)
            nodes.append(
                TracedNode(
                    token=token,
                    parent=places[parent],
                    source=sources[column] if column else "",
                    accepted=column in path,
                )
            )
        bonus = int(verified.emitted[0, int(verified.num_emitted[0]) - 1])
        self.steps.append(
            TracedStep(nodes=nodes, bonus=TracedToken(token=bonus), seconds=self._seconds)
        )


def column_sources(
    proposed: Sequence[str], columns: Sequence[int] | None, forced: Sequence[bool] | None
) -> list[str]:
    """Where the token of each column of a verified tree came from.

    Args:
        proposed: The source of each column of the tree as it was proposed.
        columns: The column of each node in that tree, -1 for what only a grammar has drafted; None
            if they are the same.
        forced: Whether a grammar leaves no token but that of the node; None if it does for none.
    """
    if columns is None:
        return list(proposed)
    certain, likely = SOURCES
    names = [likely if column < 0 else proposed[column] for column in columns]
    if forced is None:
        return names
    return [certain if sure else name for name, sure in zip(names, forced, strict=True)]
