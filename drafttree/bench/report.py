"""Computes the figures of a run from the answers of both sides, without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from drafttree.bench.errors import EngineError
from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import Generation

Verdict = Literal["identical", "tie", "different"]

_TIMES = ("tokens_per_second", "speedup", "seconds", "time_share", "_ms", "gain")
"""How the names of figures end that are times or follow from times."""


@dataclass
class Repetition:
    """One pass over all prompts.

    Attributes:
        plain: For each prompt, the plain side's answers to its turns.
        method: For each prompt, the method's answers to its turns.
    """

    plain: list[list[Generation]]
    method: list[list[Generation]]


def first_difference(
    plain: Sequence[Sequence[int]], method: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """Turn and position of the first difference between two chats; None if they are identical."""
    for turn, (left, right) in enumerate(zip(plain, method, strict=True)):
        if list(left) != list(right):
            same = (a == b for a, b in zip(left, right, strict=False))
            position = next((i for i, equal in enumerate(same) if not equal), None)
            return turn, min(len(left), len(right)) if position is None else position
    return None


def figures(
    repetitions: Sequence[Repetition], verdicts: Sequence[Verdict], chosen: Sequence[int]
) -> dict[str, Any]:
    """Figures of the chosen prompts: counts of the first repetition, medians of rates and speedups
    over all repetitions."""
    first = repetitions[0]
    method, plain = Totals(first.method, chosen), Totals(first.plain, chosen)
    rates: dict[str, list[float | None]] = {
        name: [rate(Totals(getattr(repetition, side), chosen)) for repetition in repetitions]
        for name, side, rate in (
            ("tokens_per_second", "method", Totals.tokens_per_second),
            ("baseline_tokens_per_second", "plain", Totals.tokens_per_second),
            ("decode_tokens_per_second", "method", Totals.decode_tokens_per_second),
            ("baseline_decode_tokens_per_second", "plain", Totals.decode_tokens_per_second),
        )
    }

    def speedup(of: str) -> float | None:
        """Median of speedups within a repetition: machine load may differ between repetitions."""
        return _median(map(_quotient, rates[of], rates[f"baseline_{of}"]))

    return {
        "prompts": len(chosen),
        "new_tokens": method.tokens,
        "baseline_new_tokens": plain.tokens,
        "steps": method.steps,
        "baseline_steps": plain.steps,
        "mean_accepted_tokens": _quotient(method.step_tokens, method.steps),
        "baseline_mean_accepted_tokens": _quotient(plain.step_tokens, plain.steps),
        **{name: _median(each) for name, each in rates.items()},
        "speedup": speedup("tokens_per_second"),
        "decode_speedup": speedup("decode_tokens_per_second"),
        "identical": sum(verdicts[i] == "identical" for i in chosen),
        "ties": sum(verdicts[i] == "tie" for i in chosen),
    }


def figures_by_category(
    repetitions: Sequence[Repetition],
    verdicts: Sequence[Verdict],
    categories: Mapping[int, str],
) -> dict[str, dict[str, Any]]:
    """The figures of each category.

    Args:
        repetitions: All repetitions.
        verdicts: For each prompt, how the two sides' answers compare.
        categories: The category of each of the chosen prompts, by its index.
    """
    return {
        name: figures(
            repetitions, verdicts, [i for i, category in categories.items() if category == name]
        )
        for name in sorted(set(categories.values()))
    }


def report(
    prompts: Sequence[Prompt],
    repetitions: Sequence[Repetition],
    verdicts: Sequence[Verdict],
    costs: Mapping[str, float | int],
) -> dict[str, Any]:
    """Figures of the whole run, figures by category, and the steps and rates of each repetition.

    Args:
        prompts: The prompts of all waves.
        repetitions: All repetitions.
        verdicts: For each prompt, how the two sides' answers compare.
        costs: Result of `verification_cost`, from which the possible speedup is computed, or empty.
    """
    everything = range(len(prompts))
    categories = {i: prompt.category for i, prompt in enumerate(prompts)}
    shown = (
        *("steps", "tokens_per_second", "baseline_tokens_per_second"),
        *("speedup", "decode_speedup"),
    )
    singles = [figures([repetition], verdicts, everything) for repetition in repetitions]
    whole = figures(repetitions, verdicts, everything)
    if costs:
        possible = _quotient(whole["mean_accepted_tokens"], costs["verify_cost"])
        whole |= {**costs, "possible_decode_speedup": possible}
    return {
        **whole,
        "differing": list(
            dict.fromkeys(  # a prompt may be asked in several waves
                prompt.question_id
                for prompt, verdict in zip(prompts, verdicts, strict=True)
                if verdict != "identical"
            )
        ),
        "repetitions": [{name: single[name] for name in shown} for single in singles],
        "per_category": figures_by_category(repetitions, verdicts, categories),
    }


def without_times(figures: Any) -> Any:
    """A report whose figures of time are None, those within its lists and tables too."""
    if isinstance(figures, list):
        return [without_times(each) for each in figures]
    if not isinstance(figures, dict):
        return figures
    return {
        name: None if name.endswith(_TIMES) or name.startswith("ms_") else without_times(each)
        for name, each in figures.items()
    }


def check_counters(
    repetition: Repetition, counters: dict[str, int], *, ahead: bool = False
) -> None:
    """Check the method's counters against the engine's outputs.

    The counters may have more emitted tokens than the engine returned, because an accepted path can
    go beyond an end-of-text token or the token limit. They never have fewer, and the surplus never
    exceeds the accepted tokens.

    Args:
        repetition: The outputs.
        counters: The counters.
        ahead: Whether the engine schedules a step before the outcome of the one before is known.
            After the end of each answer one more may run then, of which nothing is returned.

    Raises:
        EngineError: The counters and the outputs disagree.
    """
    sums = totals(repetition.method)
    answers = sum(len(turns) for turns in repetition.method)
    further = counters["steps"] - sums.steps
    surplus = counters["emitted"] - sums.step_tokens
    if (
        not 0 <= further <= (answers if ahead else 0)
        or not 0 <= surplus <= counters["accepted_tokens"] + further
    ):
        raise EngineError(
            "the method's own counters disagree with the engine's outputs: "
            f"steps {counters['steps']} against {sums.steps}, "
            f"emitted tokens {counters['emitted']} against {sums.step_tokens}"
        )


def totals(side: Sequence[Sequence[Generation]]) -> Totals:
    """Sums over all answers of one side."""
    return Totals(side, range(len(side)))


class Totals:
    """Sums over one side's answers to the chosen prompts."""

    def __init__(self, side: Sequence[Sequence[Generation]], chosen: Iterable[int]) -> None:
        answers = [answer for i in chosen for answer in side[i]]
        self.tokens = sum(len(answer.token_ids) for answer in answers)
        self.steps = sum(answer.steps for answer in answers)
        self.step_tokens = sum(answer.step_tokens for answer in answers)
        self.seconds = sum(answer.seconds for answer in answers)
        self.decode_tokens = sum(answer.decode_tokens for answer in answers)
        self.decode_seconds = sum(answer.decode_seconds for answer in answers)

    def tokens_per_second(self) -> float | None:
        return _quotient(self.tokens, self.seconds)

    def decode_tokens_per_second(self) -> float | None:
        return _quotient(self.decode_tokens, self.decode_seconds)


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
