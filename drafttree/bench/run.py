"""A bench run: two engines side by side that answer the same batches alternately."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol

from drafttree.bench.chat import Chat
from drafttree.bench.context import DEFAULT_CONTEXT, usable_context
from drafttree.bench.cost import mean_context, verification_cost
from drafttree.bench.draft_figures import draft_figures
from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.machine import model_name, processor_name, shown_options
from drafttree.bench.methods import BenchMethod
from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import EngineSpec, Generation, Request
from drafttree.bench.report import (
    Repetition,
    Verdict,
    check_counters,
    first_difference,
    report,
    without_times,
)
from drafttree.bench.requests import make_request
from drafttree.bench.waves import wave_figures

_TIE = 1e-4
_WARM_UP = (
    Prompt("warm-up 1", "warm-up", ("Count from one to ten, then count back.",)),
    Prompt("warm-up 2", "warm-up", ("Name three colours, and name them once more.",)),
)
_WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a run.

    Attributes:
        engine: `vllm` or `sglang`.
        method: The method to compare with plain decoding.
        model: Folder of the target.
        prompts: Prompts to answer.
        max_new_tokens: Greatest number of tokens of an answer.
        batch_size: Prompts answered together.
        temperature: Sampling temperature; 0 is greedy.
        dtype: Data type of both engines.
        repeat: Number of repetitions.
        waves: How often the prompts are asked in a repetition; what was learned in a wave is kept
            for the next.
        eager: Whether the engines skip compilation and CUDA graphs.
        verbose: Whether to show the engines' output.
        runner: vLLM's model runner, `v1` or `v2`; None for the one that it takes by itself.
        prime: Whether the method's drafter first computes all that it can beforehand.
        most_context: The engines' greatest context in tokens.
    """

    engine: str
    method: BenchMethod
    model: Path
    prompts: list[Prompt]
    max_new_tokens: int = 128
    batch_size: int = 1
    temperature: float = 0.0
    dtype: str = "float32"
    repeat: int = 1
    waves: int = 1
    eager: bool = False
    verbose: bool = False
    runner: str | None = None
    prime: bool = False
    most_context: int = DEFAULT_CONTEXT

    def context(self) -> int:
        """The engines' context in tokens; see `usable_context`."""
        draft_model = self.method.draft_model
        return usable_context(
            self.model, self.max_new_tokens, self.engine, draft_model, self.most_context
        )


class Observer(Protocol):
    """Receives the progress of a run."""

    def status(self, text: str) -> None:
        """A new stage of the run starts."""

    def advance(self) -> None:
        """One side has answered one batch."""

    def answered(self, prompt: Prompt, plain: list[Generation], method: list[Generation]) -> None:
        """Both sides have answered a prompt, in the first repetition."""


def batches(settings: BenchSettings) -> list[list[Prompt]]:
    """The prompts of all waves in the given order, `batch_size` at a time."""
    size = settings.batch_size
    wave = [settings.prompts[i : i + size] for i in range(0, len(settings.prompts), size)]
    return wave * settings.waves


def run(settings: BenchSettings, observer: Observer) -> dict[str, Any]:
    """Measure the method against plain decoding and return a report, ready for JSON.

    Raises:
        InputError: The settings do not fit the model.
        EngineError: An engine failed, or its outputs disagree with the method's counters.
    """
    context = settings.context()
    plain_spec = EngineSpec(
        model=str(settings.model),
        dtype=settings.dtype,
        batch_size=settings.batch_size,
        max_model_len=context,
        eager=settings.eager,
        runner=settings.runner,
    )
    method_spec = replace(plain_spec, speculative_config=settings.method.speculative_config)
    chat = Chat(settings.model)
    with ExitStack() as stack:
        observer.status("starting the engines")
        processes = []
        for label, spec in (("plain", plain_spec), (settings.method.name, method_spec)):
            process = EngineProcess(settings.engine, label, spec, verbose=settings.verbose)
            processes.append(stack.enter_context(process))
            if not settings.eager:  # the second engine then reuses the first one's compile cache
                process.wait_until_ready()
        for process in processes:
            process.wait_until_ready()
        if settings.prime and settings.method.primes:
            observer.status("priming")
            for _ in processes[1].priming():
                pass
        return Pair(settings, observer, chat, context, processes[0], processes[1]).measure()


class Pair:
    """The two running engines and the requests to them.

    Args:
        settings: Settings of the run; the engines may have a greater batch size.
        observer: Receives the progress.
        chat: The chat format of the model.
        context: The engines' context in tokens.
        plain: The engine that decodes plainly.
        method: The engine with the method.
    """

    def __init__(
        self,
        settings: BenchSettings,
        observer: Observer,
        chat: Chat,
        context: int,
        plain: EngineProcess,
        method: EngineProcess,
    ) -> None:
        self.settings = settings
        self.observer = observer
        self.chat = chat
        self.context = context
        self.plain = plain
        self.method = method
        self.cut: set[int | str] = set()
        self.counters: list[dict[str, int]] = []

    def measure(self) -> dict[str, Any]:
        """Answer all prompts on both sides and return a report, ready for JSON.

        Raises:
            EngineError: An engine failed, or its outputs disagree with the method's counters.
        """
        settings, observer = self.settings, self.observer
        info = self.plain.wait_until_ready()
        # A method may need another of vLLM's model runners than plain decoding takes.
        runner = self.method.wait_until_ready().runner
        drafts_trees = settings.method.drafts_trees
        prompts = settings.prompts * settings.waves
        observer.status("warming up")
        self.warm_up()
        self.cut.clear()
        repetitions: list[Repetition] = []
        counters: list[dict[str, int]] = []
        acceptance: dict[str, Any] = {}
        drafting: dict[str, float] = {}
        for number in range(settings.repeat):
            which = f" {number + 1} of {settings.repeat}" if settings.repeat > 1 else ""
            observer.status(f"answering{which}")
            before = self.draft_seconds()
            repetitions.append(self.repetition(number))
            if number == 0 and drafts_trees:
                counters = self.counters
                check_counters(repetitions[0], counters[-1], ahead=runner == "v2")
                acceptance = self.method.acceptance()
                seconds = self.draft_seconds() - before
                drafting = draft_figures(
                    *(repetitions[0], settings.method, settings.model),
                    # V2 does not measure it.
                    None if runner == "v2" else seconds,
                )
        observer.status("comparing")
        verdicts = [
            self.verdict(prompt, plain, method)
            for prompt, plain, method in zip(
                prompts, repetitions[0].plain, repetitions[0].method, strict=True
            )
        ]
        costs: dict[str, float | int] = {}
        explained: list[dict[str, Any]] = []
        choices: list[dict[str, Any]] = []
        if drafts_trees:
            explained, choices = self.method.explain(), self.method.choices()
        if drafts_trees and info.timed and "v2" not in (info.runner, runner):
            observer.status("timing forwards")
            drafted = counters[-1]["draft_tokens"] / max(counters[-1]["drafted_steps"], 1)
            tokens = 1 + max(round(drafted), 1)
            costs = verification_cost(
                self.plain,
                self.method,
                # A batch has prompts of one wave only.
                requests=min(settings.batch_size, len(settings.prompts)),
                tokens=tokens,
                context=min(mean_context(repetitions[0].plain), self.context - tokens),
            )
        figures = {
            **drafting,
            "waves": wave_figures(
                repetitions, verdicts, [prompt.category for prompt in settings.prompts], counters
            ),
            **report(prompts, repetitions, verdicts, costs),
            "explained": explained,
            "choices": choices,
        }
        return {
            "engine": settings.engine,
            "engine_version": info.version,
            **({} if info.runner is None else {"runner": info.runner}),
            **({} if runner == info.runner else {"method_runner": runner}),
            "method": settings.method.name,
            "model": model_name(settings.model),
            "dtype": settings.dtype,
            "device": info.device,
            "cpu": processor_name(),
            "eager": settings.eager,
            "batch_size": settings.batch_size,
            "temperature": settings.temperature,
            "options": shown_options(settings.method.options),
            "max_new_tokens": settings.max_new_tokens,
            "repeat": settings.repeat,
            "context": self.context,
            "cut_prompts": len(self.cut),
            "counters": counters[-1] if counters else {},
            "acceptance": acceptance,
            **(figures if info.timed else without_times(figures)),
        }

    def draft_seconds(self) -> float:
        """Seconds spent drafting so far; 0 if the engine does not report them."""
        return self.method.draft_seconds() if self.settings.method.timed else 0.0

    def warm_up(self) -> None:
        """Generate a few short answers on each side, which are not counted."""
        for process in (self.plain, self.method):
            for _ in range(2):
                self._answer(process, list(_WARM_UP), _WARM_UP_TOKENS)

    def repetition(self, number: int) -> Repetition:
        """Answer all waves of prompts on both sides, starting from empty caches and tables.

        The first repetition notes the method's counters at the end of each wave."""
        self.plain.reset(tables=False)
        self.method.reset(tables=self.settings.method.learns)
        result = Repetition([], [])
        for index, batch in enumerate(batches(self.settings)):
            sides = [(self.plain, result.plain), (self.method, result.method)]
            for process, answers in sides if (number + index) % 2 == 0 else sides[::-1]:
                answers.extend(self._answer(process, batch, self.settings.max_new_tokens))
                self.observer.advance()
            if number == 0:
                for i, prompt in enumerate(batch, start=len(result.plain) - len(batch)):
                    self.observer.answered(prompt, result.plain[i], result.method[i])
                wave_ends = len(result.method) % len(self.settings.prompts) == 0
                if wave_ends and self.settings.method.drafts_trees:
                    self.counters.append(self.method.counters())
        return result

    def verdict(self, prompt: Prompt, plain: list[Generation], method: list[Generation]) -> Verdict:
        """Whether the answers are identical, or first differ where two tokens are as likely."""
        difference = first_difference(
            [answer.token_ids for answer in plain], [answer.token_ids for answer in method]
        )
        if difference is None:
            return "identical"
        if self.settings.temperature > 0:
            return "different"
        turn, position = difference
        answers = [self.chat.decode(answer.token_ids) for answer in plain[:turn]]
        request = self._request(prompt, turn, answers, self.settings.max_new_tokens)
        token_ids = request.token_ids + plain[turn].token_ids[:position]
        chosen = [side[turn].token_ids[position : position + 1] for side in (plain, method)]
        if [] in chosen or len(token_ids) >= self.context:
            return "different"
        [[expected], [found]] = chosen
        if prompt.schema is None:
            best = self.plain.top_logprobs(token_ids)
            gap = max(best.values()) - best.get(found, -inf)
        else:
            # The best tokens may be forbidden by the schema.
            likely = self.plain.logprobs(token_ids, [expected, found])
            gap = abs(likely[expected] - likely[found])
        return "tie" if gap <= _TIE else "different"

    def _answer(
        self, process: EngineProcess, batch: list[Prompt], max_new_tokens: int
    ) -> list[list[Generation]]:
        """Answer all turns of a batch of prompts, each with the previous answers in its context."""
        answers: list[list[Generation]] = [[] for _ in batch]
        texts: list[list[str]] = [[] for _ in batch]
        for turn in range(max(len(prompt.turns) for prompt in batch)):
            here = [i for i, prompt in enumerate(batch) if turn < len(prompt.turns)]
            requests = [self._request(batch[i], turn, texts[i], max_new_tokens) for i in here]
            size = self.settings.batch_size
            for start in range(0, len(here), size):
                generations = process.generate(requests[start : start + size])
                for i, generation in zip(here[start : start + size], generations, strict=True):
                    answers[i].append(generation)
                    texts[i].append(self.chat.decode(generation.token_ids))
        return answers

    def _request(
        self, prompt: Prompt, turn: int, answers: list[str], max_new_tokens: int
    ) -> Request:
        request, cut = make_request(
            self.chat,
            prompt,
            turn,
            answers,
            context=self.context,
            max_new_tokens=max_new_tokens,
            temperature=self.settings.temperature,
        )
        if cut:
            self.cut.add(prompt.question_id)
        return request
