"""SGLang's own CUDA graphs are captured on the fake GPU for trees of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu.comparison import assert_same
from fake_gpu.tensors import Gpu

pytest.importorskip("sglang", reason="SGLang is not installed here")

from fake_gpu.sglang_cases import GREEDY, WEIGHTS, asked, prompt
from fake_gpu.sglang_graphs import GraphModelRunner
from fake_gpu.sglang_hosts import DRAFT_MODEL, HIDDEN_STATES, SCRIPTED, ScriptedDrafter
from fake_gpu.sglang_steps import Asked, Decoded, decode
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.runtime_context import get_context, get_exec

from drafttree.budget.step_timer import StepTimer
from drafttree.sglang.drafters.hidden_state import HiddenStateWorker
from drafttree.sglang.graphs import draft_model, sizes, worker
from drafttree.sglang.graphs.runners import TreeGraphs, why_one_size

OPTIONS = {"tree": "branch:3-2-1", "prime": False}
REQUESTS = [1, 2, 4]


def drafted_by_script(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None) -> Decoded:
    """Steps whose trees have 15 draft tokens, 2, 0, and so on."""
    monkeypatch.setattr(ScriptedDrafter, "script", cycle((15, 2, 0, 6, 15, 1)))
    requests = asked(GREEDY, GREEDY, GREEDY)
    found = decode(OPTIONS, requests, WEIGHTS, gpu, host=SCRIPTED, requests=REQUESTS)
    for name, each in requests.items():
        assert found.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)
    assert found.counts["accepted_tokens"] > 0
    return found


def test_each_step_replays_a_graph_of_its_size(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafted_by_script(monkeypatch, None)
    found = drafted_by_script(monkeypatch, gpu)
    assert_same(expected, found, asked(GREEDY, GREEDY, GREEDY))
    assert found.captured == dict.fromkeys((16, 8, 4, 1), REQUESTS)
    # Trees of 2 draft tokens are padded to 3, those of 6 to 7.
    script = (16, 4, 1, 8, 16, 4)
    steps = found.replayed[-len(found.steps) :]
    assert [rows for rows, _ in steps] == [script[step % 6] for step in range(len(steps))]
    assert {rows for rows, requests in steps if requests == 4} >= {16, 4}
    for record in found.steps:
        assert not record.waits, record.report()


def test_steps_of_many_requests_have_smaller_trees(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MOST_ROWS", 32)
    found = drafted_by_script(monkeypatch, gpu)
    assert found.captured == {16: [1, 2], 8: REQUESTS, 4: REQUESTS, 1: REQUESTS}
    steps = found.replayed[-len(found.steps) :]
    assert {rows for rows, requests in steps if requests == 4} == {8, 4}
    assert {rows for rows, requests in steps if requests < 4} >= {16, 1}


def test_graphs_return_the_hidden_states_that_a_layer_reads(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = HiddenStateWorker._propose

    def propose(self: HiddenStateWorker, batch: Any) -> Any:
        assert not get_exec().features.enable_return_hidden_states, "users may ask for them"
        assert self.has_own_graphs == (self._device.type != "cpu")
        return stock(self, batch)

    published: list[tuple[Any, Any]] = []
    verify, read = HiddenStateWorker._verify, HiddenStateWorker._read_accepted

    def verified(self: HiddenStateWorker, step: Any, output: Any) -> Any:
        published.append((self._runner.shared_read_done_event, None))
        outcome = verify(self, step, output)
        published[-1] = published[-1][0], self._runner.shared_read_done_event
        return outcome

    def read_accepted(self: HiddenStateWorker, *given: Any) -> None:
        read(self, *given)
        assert self._runner.shared_read_done_event is published[-1][0]

    monkeypatch.setattr(HiddenStateWorker, "_propose", propose)
    requests = asked(GREEDY, GREEDY, GREEDY)
    options = {"steps": 3, "width": 2, "nodes": 5, "resample_nodes": 3}
    expected = decode(options, requests, WEIGHTS, None, host=HIDDEN_STATES)
    monkeypatch.setattr(HiddenStateWorker, "_verify", verified)
    monkeypatch.setattr(HiddenStateWorker, "_read_accepted", read_accepted)
    found = decode(options, requests, WEIGHTS, gpu, host=HIDDEN_STATES, requests=REQUESTS)
    assert_same(expected, found, requests)
    for name, each in requests.items():
        assert found.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)
    assert found.captured == {9: REQUESTS}
    # SGLang's scheduler waits for what the layer reads too, and not only for the target.
    assert len(published) == len(found.steps)
    for target, layer in published:
        assert target is not layer
        assert None not in (target, layer)
    assert len(found.replayed) >= len(found.steps)
    assert found.counts["accepted_tokens"] > 0
    for record in found.steps:
        assert not record.waits, record.report()


@pytest.mark.parametrize("tree", ["beam:2x3", pytest.param("branch:2-2-1", marks=pytest.mark.full)])
def test_graphs_of_a_draft_model(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    """It reads whole trees of one size at each level, so there is one graph for each batch."""
    drafting: list[bool] = []
    stock = GraphModelRunner.forward

    def forward(self: GraphModelRunner, batch: Any) -> Any:
        drafting.append(self.is_draft_worker)
        return stock(self, batch)

    def verify_in_graphs(runner: Any) -> None:
        assert runner.is_draft_worker
        assert not hasattr(runner.attn_backend, "_masks"), "its buffers were allocated before"
        readied.append(runner)

    readied: list[Any] = []
    monkeypatch.setattr(draft_model, "verify_in_graphs", verify_in_graphs)
    monkeypatch.setattr(GraphModelRunner, "forward", forward)
    requests = asked(GREEDY, GREEDY, GREEDY)
    given: dict[str, Any] = {"host": DRAFT_MODEL, "overlap": False}
    expected = decode({"tree": tree}, requests, WEIGHTS, None, **given)
    found = decode({"tree": tree}, requests, WEIGHTS, gpu, requests=REQUESTS, **given)
    assert_same(expected, found, requests)
    for name, each in requests.items():
        assert found.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)
    assert found.counts["accepted_tokens"] > 0
    assert len(readied) == 1
    # Roots and three levels are read by the draft model, and then all by the target.
    assert drafting == [True, True, True, True, False] * len(found.steps)
    for record in found.steps:
        assert not record.waits, record.report()


def _one_for_all(self: TreeGraphs, num_draft_tokens: int, backend: Any, graphs: Any) -> None:
    self._captured[num_draft_tokens + 1] = backend, graphs
    for rows in self._captured:
        self._captured[rows] = self._captured[16]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("_add", _one_for_all, "no graph for this step"),
        ("_config", lambda self, num_draft_tokens: self._stock, r"have \(16, \(1, 2, 4\)\)"),
    ],
)
def test_a_wrong_graph_is_found(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Callable[..., Any],
    message: str,
) -> None:
    monkeypatch.setattr(sizes, "MOST_ROWS", 32)
    monkeypatch.setattr(TreeGraphs, name, fault)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        drafted_by_script(monkeypatch, gpu)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_auto_moves_between_sizes_by_the_times_of_steps(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """A draft token costs next to nothing at first; later it costs more than it can save."""
    now, row_seconds, running = 0.0, 0.001, 0.0
    stock_init, stock_forward = StepTimer.__init__, GraphModelRunner.forward
    stock_seconds = worker.verification_seconds
    measured: set[int] = set()

    def with_clock(self: StepTimer, clock: Callable[[], float], **given: Any) -> None:
        stock_init(self, lambda: now, **given)

    def forward(self: GraphModelRunner, batch: Any) -> Any:
        nonlocal now, row_seconds, running
        output = stock_forward(self, batch)
        rows, requests = self.replayed[-1]
        taken = 1 + row_seconds * (rows * requests - 1)
        # With overlap the host waits for the step before, once it has launched this one.
        now += running if overlap and not measuring else taken
        running = taken
        if len(self.replayed) == cheap_until:
            row_seconds = 2.0
        return output

    def seconds(runner: Any, requests: int, tokens: int, context: int) -> float:
        nonlocal cheap_until, measuring
        before, measuring = now, True
        stock_seconds(runner, requests, tokens, context)
        measuring = False
        measured.add(requests * tokens)
        cheap_until = len(runner.replayed) + 10
        return now - before

    cheap_until, measuring = 0, False
    monkeypatch.setattr(StepTimer, "__init__", with_clock)
    monkeypatch.setattr(GraphModelRunner, "forward", forward)
    monkeypatch.setattr(worker, "verification_seconds", seconds)
    requests = {"one": Asked(prompt(0, 9), 60, GREEDY)}
    options = {"prime": False, "max_nodes": 15}
    shape = {"requests": [1, 2], "overlap": overlap, "waits": not overlap}
    found = decode(options, requests, WEIGHTS, gpu, **shape)
    assert found.texts["one"] == WEIGHTS.plain_text(requests["one"].prompt, 60)
    assert found.counts["accepted_tokens"] > 0
    assert measured == {1, 2, 4, 8, 16, 32}
    steps = [rows for rows, _ in found.replayed[-len(found.steps) :]]
    assert max(steps[:10]) == 16
    # The last steps are plain, but for trials.
    assert steps[-18:].count(1) >= 12
    # Without overlap the host has read each step's tokens before the next step.
    for record in found.steps:
        assert {wait.what for wait in record.waits} <= (set() if overlap else {"an event"})


@pytest.mark.parametrize(
    ("server", "lora", "reason"),
    [
        ({}, None, None),
        ({}, object(), "LoRA adapters are served"),
        ({"disable_cuda_graph_padding": True}, None, "batches are not padded"),
        (
            {"cuda_graph_config": CudaGraphConfig(decode=PhaseConfig(backend="disabled"))},
            None,
            "the backend of CUDA graphs is disabled",
        ),
    ],
)
def test_what_keeps_trees_of_one_size(
    server: dict[str, Any], lora: Any, reason: str | None
) -> None:
    graphs = CudaGraphConfig(decode=PhaseConfig(backend="full", bs=[1]))
    with get_context().override_server_args(**{"cuda_graph_config": graphs, **server}):
        assert why_one_size(SimpleNamespace(lora_manager=lora)) == reason
