"""Messages between the bench and its engine processes.

They are plain dataclasses, so that both sides can be imported without an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafttree.trace import StepSeconds, TracedStep

HELD_BACK = {"vllm": 0, "sglang": 6}
"""Tokens of an engine's context that no prompt may take, by engine; answers may take some.

SGLang aborts a longer prompt, and would end the answer to a shorter one up to two tokens early.
"""


@dataclass(frozen=True)
class EngineSpec:
    """How to start an engine process.

    Attributes:
        model: Folder of the target.
        dtype: Name of the data type of weights and activations.
        batch_size: Greatest number of requests that run together.
        max_model_len: Greatest number of tokens of a request, prompt and output together.
        eager: Whether to skip compilation and CUDA graphs.
        speculative_config: The engine's speculative configuration; None for plain decoding.
        tokenizer: Whether the engine loads the tokenizer. Without it answers have no schema, and in
            vLLM they do not end at the EOS.
        runner: vLLM's model runner, `v1` or `v2`; None for the one that it takes by itself.
        kv_cache_bytes: Size of vLLM's KV cache on a GPU; None for what fits beside one engine more.
    """

    model: str
    dtype: str = "float32"
    batch_size: int = 1
    max_model_len: int = 2048
    eager: bool = False
    speculative_config: dict[str, Any] | None = None
    tokenizer: bool = True
    runner: str | None = None
    kv_cache_bytes: int | None = None

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens per step; enough for a complete tree of every request."""
        return max(2048, self.batch_size * 96)


@dataclass(frozen=True)
class EngineInfo:
    """What is known of a started engine.

    Attributes:
        version: Its version.
        device: Type of its device.
        runner: vLLM's model runner, `v1` or `v2`; None in SGLang.
        timed: Whether its times mean anything: not where kernels run in Triton's interpreter.
    """

    version: str
    device: str
    runner: str | None = None
    timed: bool = True


@dataclass(frozen=True)
class Request:
    """One answer to generate.

    Attributes:
        token_ids: Tokens of the prompt.
        max_tokens: Greatest number of tokens to generate.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed for sampling.
        schema: JSON schema that the answer follows, as JSON; None for a free answer.
    """

    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    schema: str | None = None


@dataclass(frozen=True)
class ForwardShape:
    """A target forward to time.

    Attributes:
        requests: Batch size.
        tokens: Query tokens per request.
        context: Cached tokens per request.
        tree: Whether the tokens form a draft tree instead of a causal chain.
        repeat: Number of forwards to time.
    """

    requests: int
    tokens: int
    context: int
    tree: bool
    repeat: int


@dataclass
class Generation:
    """One answer, its counts and its share of the time.

    The time of an engine step is shared equally by the requests that run in it.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        token_ids: Tokens generated.
        steps: Decode steps of this request, which are those after its first token.
        step_tokens: Tokens emitted by these steps.
        seconds: Share of the time of all engine steps.
        decode_tokens: Tokens emitted by engine steps in which no request was in prefill.
        decode_seconds: Share of the time of these steps.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    step_tokens: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def extend(self, token_ids: list[int], *, decoding: bool) -> None:
        """Count what an engine step has emitted.

        Args:
            token_ids: The tokens generated so far.
            decoding: Whether no request was in prefill in the step.
        """
        emitted = len(token_ids) - len(self.token_ids)
        if self.token_ids and emitted:
            self.steps += 1
            self.step_tokens += emitted
        if decoding:
            self.decode_tokens += emitted
        self.token_ids = token_ids

    def add_seconds(self, seconds: float, *, decoding: bool) -> None:
        """Add the share of an engine step's time; `decoding` as for `extend`."""
        self.seconds += seconds
        if decoding:
            self.decode_seconds += seconds


@dataclass(frozen=True)
class Traced:
    """One answer, and how a method that drafts trees came to it.

    Attributes:
        generation: The answer.
        prompt_seconds: Where the time went up to the answer's first token.
        steps: The decode steps.
    """

    generation: Generation
    prompt_seconds: StepSeconds
    steps: list[TracedStep]
