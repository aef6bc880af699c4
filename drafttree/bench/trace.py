"""Traces an answer: each decode step of one request in the real engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafttree.bench.chat import Chat
from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.errors import EngineError, InputError
from drafttree.bench.machine import model_name, processor_name
from drafttree.bench.protocol import EngineInfo, EngineSpec, Request, Traced
from drafttree.bench.requests import make_request
from drafttree.bench.run import BenchSettings
from drafttree.bench.token_texts import AnswerTexts
from drafttree.trace import StepSeconds, TracedStep, TracedToken


class Trace(BaseModel):
    """An answer, step by step, and the conditions under which it was given.

    Attributes:
        engine: `vllm` or `sglang`.
        engine_version: Its version.
        method: The method that drafted.
        options: The method's options as given.
        model: Name of the target.
        dtype: Data type of weights and activations.
        device: Type of the engine's device.
        cpu: The machine's processor.
        eager: Whether compilation and CUDA graphs were skipped.
        temperature: Sampling temperature; 0 is greedy.
        max_new_tokens: Greatest number of tokens of the answer.
        prompt: The turns of the chat, the traced one last.
        prompt_tokens: Tokens of the prompt.
        prompt_seconds: Where the time went up to the first token, which no step emits.
        answer: Text of the answer.
        tokens: Tokens of the answer, whose joined texts are `answer`. The last step may have
            emitted more, which the engine drops after the end of a text.
        steps: The decode steps.
    """

    model_config = ConfigDict(extra="forbid")

    engine: str
    engine_version: str
    method: str
    options: dict[str, Any]
    model: str
    dtype: str
    device: str
    cpu: str
    eager: bool
    temperature: float
    max_new_tokens: int
    prompt: list[str] = Field(min_length=1)
    prompt_tokens: int
    prompt_seconds: StepSeconds
    answer: str
    tokens: list[TracedToken]
    steps: list[TracedStep]

    def by_source(self) -> list[dict[str, Any]]:
        """Rows as in `Drafter.acceptance`, the source with the most accepted tokens first."""
        tried = Counter(node.source for step in self.steps for node in step.tried)
        hit = Counter(node.source for step in self.steps for node in step.tried if node.accepted)
        return [
            {
                "source": source,
                "tried": tried[source],
                "hit": hit[source],
                "share": hit[source] / tried[source],
            }
            for source in sorted(tried, key=lambda name: (-hit[name], -tried[name], name))
        ]


def trace(settings: BenchSettings) -> Trace:
    """Answer the first prompt of the settings, and record the answer to its last turn.

    With several waves the prompt is answered that many times, and the last time counts. What the
    method learns from the answers before is kept.

    Raises:
        InputError: The settings do not fit the model.
        EngineError: The engine failed, or its answer is not what the steps emitted.
    """
    context = settings.context()
    chat = Chat(settings.model)
    prompt = settings.prompts[0]

    def request(turn: int, answers: Sequence[str]) -> Request:
        made, _ = make_request(
            chat,
            prompt,
            turn,
            answers,
            context=context,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
        )
        return made

    spec = EngineSpec(
        model=str(settings.model),
        dtype=settings.dtype,
        max_model_len=context,
        eager=settings.eager,
        speculative_config=settings.method.speculative_config,
        runner=settings.runner,
    )
    with EngineProcess(
        settings.engine, settings.method.name, spec, verbose=settings.verbose
    ) as process:
        info = process.wait_until_ready()
        for wave in range(settings.waves):
            answers: list[str] = []
            for turn in range(len(prompt.turns) - 1):
                [generation] = process.generate([request(turn, answers)])
                answers.append(chat.decode(generation.token_ids))
            last = request(len(prompt.turns) - 1, answers)
            if wave < settings.waves - 1:
                process.generate([last])
        traced = process.trace(last)
    return _decoded(settings, info, traced, chat)


def _decoded(settings: BenchSettings, info: EngineInfo, traced: Traced, chat: Chat) -> Trace:
    """A trace with the texts of its tokens.

    Raises:
        EngineError: The steps have not emitted the answer.
    """
    answer, steps = traced.generation.token_ids, traced.steps
    emitted = answer[:1] + [each.token for step in steps for each in step.emitted]
    if emitted[: len(answer)] != answer or len(steps) != traced.generation.steps:
        raise EngineError(
            f"the recorded steps disagree with the answer of the {settings.engine} engine: "
            f"{len(steps)} steps against {traced.generation.steps}"
        )
    texts = AnswerTexts(chat, answer)
    root = 0
    for step in steps:
        texts.set_step(step, root)
        root += len(step.emitted)
    return Trace(
        engine=settings.engine,
        engine_version=info.version,
        method=settings.method.name,
        options=settings.method.options,
        model=model_name(settings.model),
        dtype=settings.dtype,
        device=info.device,
        cpu=processor_name(),
        eager=settings.eager,
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        prompt=list(settings.prompts[0].turns),
        prompt_tokens=traced.generation.prompt_tokens,
        prompt_seconds=traced.prompt_seconds,
        answer=chat.decode(answer),
        tokens=[
            TracedToken(token=token, text=text)
            for token, text in zip(answer, texts.texts, strict=True)
        ],
        steps=steps,
    )


def read_trace(path: Path) -> Trace:
    """Read a trace from JSON.

    Raises:
        InputError: The file cannot be read, or is no trace.
    """
    try:
        return Trace.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except ValidationError as error:
        raise InputError(
            f"{path} is no trace: give a file that drafttree trace --json has written"
        ) from error
