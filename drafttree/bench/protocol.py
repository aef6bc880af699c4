"""The messages between the bench and its engine processes.

Plain dataclasses, so that both ends can be imported without an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """How an engine process is to be started."""

    model: str
    dtype: str = "float32"
    batch_size: int = 1
    max_model_len: int = 2048
    eager: bool = False
    speculative_config: dict[str, Any] | None = None

    @property
    def max_num_batched_tokens(self) -> int:
        """Room for a whole tree of every running request."""
        return max(2048, self.batch_size * 96)


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says of itself."""

    version: str
    device: str


@dataclass(frozen=True)
class Request:
    """One answer to generate."""

    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class ForwardShape:
    """A target forward to be timed.

    Attributes:
        requests: that are running.
        tokens: of each, computed by the forward.
        context: cached tokens of each.
        tree: whether the tokens are a draft tree or a causal chain.
        repeat: forwards to time.
    """

    requests: int
    tokens: int
    context: int
    tree: bool
    repeat: int


@dataclass
class Generation:
    """One answer, its counts and its share of the time.

    `steps` are the decode steps of this request (those after its first token), and `step_tokens`
    the tokens they emitted. An engine step's time is shared equally by the requests running in
    it; the `decode_` figures count only engine steps in which no request was still in prefill.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    step_tokens: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
