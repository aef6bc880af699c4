"""A bench run over two engines that are not there: what is asked of them, and what is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from bench_parts import NullObserver, WordChat

from drafttree.bench.context import usable_context
from drafttree.bench.engine_process import EngineProcess
from drafttree.bench.errors import InputError
from drafttree.bench.methods import BenchMethod
from drafttree.bench.prompts import Prompt
from drafttree.bench.protocol import EngineInfo, ForwardShape, Generation, Request
from drafttree.bench.run import BenchSettings, Pair
from drafttree.budget.tier_explanation import TierChoice
from drafttree.cli.bench import cut_note

TREES = BenchMethod("token-recycling", {}, {"method": "token_recycling"}, max_draft_tokens=7)
V1, V2 = EngineInfo("0.32.0", "cuda", "v1"), EngineInfo("0.32.0", "cuda", "v2")
EXPLAINED = {
    "num_draft_tokens": 7,
    "steps": 3,
    "predicted_ms": 2.0,
    "observed_ms": 1.5,
    "expected_tokens": 2.5,
    "tokens_per_second": 9.0,
}


class FakeEngine:
    """An engine that answers every request alike, in two steps after the first token."""

    def __init__(self, info: EngineInfo = V1, likely: dict[int, float] | None = None) -> None:
        self.info = info
        self.likely = likely or {}
        self.answered = 0
        self.shapes: list[ForwardShape] = []
        self.forwards: list[float] = [1.0]

    def wait_until_ready(self) -> EngineInfo:
        return self.info

    def generate(self, requests: list[Request]) -> list[Generation]:
        self.answered += len(requests)
        return [Generation(9, [5, 6, 7], 2, 2, 1.0, 2, 0.5) for _ in requests]

    def forward_seconds(self, shape: ForwardShape) -> list[float]:
        self.shapes.append(shape)
        return self.forwards

    def reset(self, tables: bool) -> None:
        self.answered = 0

    def counters(self) -> dict[str, int]:
        steps = 2 * self.answered
        return {
            **{"steps": steps, "emitted": steps, "accepted_tokens": 0},
            **{"drafted_steps": steps, "draft_tokens": 3 * steps},
        }

    def acceptance(self) -> dict[str, Any]:
        return {}

    def explain(self) -> list[dict[str, Any]]:
        return [EXPLAINED]

    def choices(self) -> list[dict[str, Any]]:
        return [TierChoice(7, "best", 1, 7, 1.2, (0, 7), (1.0, 2.5), (0.001, 0.002)).row()]

    def top_logprobs(self, token_ids: list[int]) -> dict[int, float]:
        best = sorted(self.likely, key=self.likely.__getitem__)[-2:]
        return {token: self.likely[token] for token in best}

    def logprobs(self, token_ids: list[int], tokens: list[int]) -> dict[int, float]:
        return {token: self.likely[token] for token in tokens}


def pair(plain: FakeEngine, method: FakeEngine, **settings: Any) -> Pair:
    prompts = [Prompt(number, "qa", ("Why?",)) for number in range(4)]
    given = BenchSettings("vllm", TREES, Path("model"), prompts, **settings)
    engines = cast(EngineProcess, plain), cast(EngineProcess, method)
    return Pair(given, NullObserver(), cast(Any, WordChat()), 512, *engines)


def test_costs_are_measured_with_as_many_requests_as_run_together() -> None:
    plain, method = FakeEngine(), FakeEngine()
    report = pair(plain, method, batch_size=32, waves=8).measure()
    assert report["prompts"] == 32
    assert {shape.requests for shape in plain.shapes + method.shapes} == {4}
    assert (report["verify_cost"], report["cost_tokens"]) == (1.0, 4)


def test_costs_that_an_engine_cannot_measure_are_left_out() -> None:
    plain = FakeEngine()
    plain.forwards = []
    report = pair(plain, FakeEngine()).measure()
    assert "verify_cost" not in report
    assert report["speedup"] == 1.0


@pytest.mark.parametrize(
    ("plain", "method", "named", "is_timed"),
    [
        (V1, V1, {"runner": "v1"}, True),
        (V2, V2, {"runner": "v2"}, False),
        # A method that V2 does not serve.
        (V2, V1, {"runner": "v2", "method_runner": "v1"}, False),
        (replace(V1, runner=None), replace(V1, runner=None), {}, True),
    ],
)
def test_both_runners_are_named_where_they_differ(
    plain: EngineInfo, method: EngineInfo, named: dict[str, str], is_timed: bool
) -> None:
    sides = FakeEngine(plain), FakeEngine(method)
    report = pair(*sides).measure()
    assert {key: report[key] for key in report if key.endswith("runner")} == named
    assert ("verify_cost" in report) is is_timed
    assert all(bool(side.shapes) is is_timed for side in sides)


def test_a_report_of_an_engine_whose_times_mean_nothing_has_none() -> None:
    untimed = replace(V1, timed=False)
    report = pair(FakeEngine(untimed), FakeEngine(untimed)).measure()
    [explained], [choice] = report["explained"], report["choices"]
    times = {"predicted_ms", "observed_ms", "tokens_per_second"}
    assert explained == EXPLAINED | dict.fromkeys(times)
    assert choice["gain"] is choice["ms_0"] is choice["ms_7"] is None
    assert (choice["num_draft_tokens"], choice["tokens_7"]) == (7, 2.5)
    assert report["speedup"] is None


@pytest.mark.parametrize(
    ("schema", "likely", "verdict"),
    [
        (None, {6: -1.0, 8: -1.0, 9: -5.0}, "tie"),
        (None, {6: -1.0, 8: -1.5, 9: -5.0}, "different"),
        # The schema forbids the best token, so the two sides chose among the others.
        ("{}", {6: -1.0, 8: -1.0, 9: -0.1, 10: -0.2}, "tie"),
        ("{}", {6: -1.0, 8: -1.5, 9: -0.1, 10: -0.2}, "different"),
        ("{}", {6: -1.5, 8: -1.0, 9: -0.1, 10: -0.2}, "different"),
    ],
)
def test_a_difference_is_a_tie_between_the_tokens_that_were_chosen(
    schema: str | None, likely: dict[int, float], verdict: str
) -> None:
    both = pair(FakeEngine(likely=likely), FakeEngine())
    plain, method = Generation(1, [5, 6, 7]), Generation(1, [5, 8, 7])
    assert both.verdict(Prompt(1, "qa", ("Why?",), schema), [plain], [method]) == verdict


def test_the_context_leaves_what_sglang_holds_back(tmp_path: Path) -> None:
    def model(name: str, limit: int) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"max_position_embeddings": {limit}}}')
        return folder

    short, long, draft = model("short", 512), model("long", 8192), model("draft", 1024)
    assert [usable_context(each, 64) for each in (short, long)] == [512, 2048]
    assert [usable_context(each, 64, "sglang") for each in (short, long)] == [506, 2048]
    assert usable_context(long, 64, "sglang", str(draft)) == 1018
    assert usable_context(long, 64, "vllm", str(draft)) == 1024
    assert usable_context(long, 64, "sglang", str(tmp_path / "absent")) == 2048
    assert usable_context(long, 64, "sglang", most=4096) == 4096
    assert usable_context(long, 64, most=10_000) == 8192
    with pytest.raises(InputError, match=r"tokens 506 must be below the context of 506 tokens$"):
        usable_context(short, 506, "sglang")
    with pytest.raises(InputError, match=r"below the context of 2048 tokens; .* with --context"):
        usable_context(long, 2048)


def test_the_context_that_is_asked_for_is_the_engines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    settings = BenchSettings("vllm", TREES, tmp_path, [Prompt(1, "qa", ("Why?",))])
    assert settings.context() == 2048
    assert replace(settings, most_context=40_960).context() == 40_960


def test_prompts_that_were_cut_are_counted_and_told_of() -> None:
    fitting, cutting = (
        pair(FakeEngine(), FakeEngine(), max_new_tokens=512 - 1, waves=2) for _ in range(2)
    )
    assert cut_note(fitting.measure(), 512) == ""
    prompts = cutting.settings.prompts
    prompts[0] = replace(prompts[0], turns=("Why?", "Why then?"))
    report = cutting.measure()
    assert (report["context"], report["cut_prompts"]) == (512, 1)
    told = "1 of 4 prompts were cut to their last 1 tokens: "
    assert cut_note(report, 512) == told + "give a larger --context"
    assert cut_note(report, 2048) == told + "the model, or its draft model, has no longer context"


def test_a_warm_up_that_was_cut_does_not_count() -> None:
    both = pair(FakeEngine(), FakeEngine(), max_new_tokens=8)
    both.context = 24
    assert both.measure()["cut_prompts"] == 0
