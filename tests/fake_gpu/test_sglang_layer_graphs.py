"""CUDA graphs of Lyanna's layer in SGLang, captured and replayed on the fake GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from fake_gpu.comparison import assert_within_budget
from fake_gpu.tensors import Gpu, held

pytest.importorskip("sglang", reason="SGLang is not installed here")

from fake_gpu.sglang_cases import GREEDY, VOCAB, WEIGHTS, both
from fake_gpu.sglang_cases import asked as requests_with
from fake_gpu.sglang_graphs import graphs_for
from fake_gpu.sglang_hosts import HIDDEN_STATES
from fake_gpu.sglang_steps import Decoded, decode

from drafttree.sglang.drafters.hidden_state import HiddenStateWorker
from drafttree.sglang.graphs.requests import RequestGraphs

TREES = {"steps": 3, "width": 2, "nodes": 5, "resample_nodes": 3}
REQUESTS = [1, 2, 4]
BUDGET = (10, 61, 0, 0)
"""Most kernels, operations of PyTorch, copies in and copies out of a greedy step with drafts."""


def served(gpu: Gpu, **options: Any) -> Decoded:
    """Decode three requests on the CPU and in graphs on the fake GPU, and compare."""
    requests = requests_with(GREEDY, GREEDY, GREEDY)
    return both(TREES | options, requests, gpu, host=HIDDEN_STATES, requests=REQUESTS)


def drafted(found: Decoded) -> list[Any]:
    """The steps with drafts."""
    return [
        record
        for record, trees in zip(found.steps, found.trees, strict=True)
        if any(len(tokens) > 1 for tokens, _ in trees.values())
    ]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"tables": {"prime": False}}, marks=pytest.mark.full)]
)
def test_steps_replay_graphs_of_the_layer(gpu: Gpu, options: dict[str, Any]) -> None:
    """One for its trees, or for its steps along chains, and one for the accepted paths."""
    found = served(gpu, **options)
    assert len(drafted(found)) > 5
    for record in drafted(found):
        assert record.kernels["graph"] == 2
        assert not record.waits, record.report()
        if not options:
            assert_within_budget(record, BUDGET)


def test_trees_of_auto_are_built_in_the_graph_too(gpu: Gpu) -> None:
    """Nothing is planned there, so they all have the largest shape."""
    requests = requests_with(GREEDY, GREEDY, GREEDY)
    options = {"steps": 3, "width": 2, "nodes": "auto"}
    found = both(options, requests, gpu, host=HIDDEN_STATES, requests=REQUESTS)
    assert len(drafted(found)) > 5
    for record in drafted(found):
        assert record.kernels["graph"] == 2
        assert_within_budget(record, BUDGET)


def test_padding_has_no_slots_after_priming(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch is padded, the layer writes KV to the slots of the first row."""
    primed: set[tuple[int, int]] = set()
    stock = HiddenStateWorker._propose

    def propose(self: HiddenStateWorker, batch: Any) -> Any:
        primed.add(self._primed)
        assert not held(self.req_to_token_pool.req_to_token)[0].any()
        return stock(self, batch)

    monkeypatch.setattr(HiddenStateWorker, "_propose", propose)
    # Tensors of the fake GPU have no views in inference mode.
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    requests = requests_with(GREEDY, GREEDY, GREEDY)
    options = {**TREES, "tables": {"prime": True, "prime_seconds": 60}}
    found = decode(options, requests, WEIGHTS, gpu, host=HIDDEN_STATES, requests=REQUESTS)
    assert primed == {(VOCAB, VOCAB)}
    assert {size for _, size in found.replayed} == {*REQUESTS}
    for name, each in requests.items():
        assert found.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)


def test_inputs_may_be_narrower_than_their_buffers(gpu: Gpu) -> None:
    """As are the paths of steps whose trees are not as deep as any may be."""
    graphs = RequestGraphs(lambda _, slots, paths: (slots + paths[:, 0],), lambda *_: None)
    with graphs_for(gpu, REQUESTS):
        longs = partial(torch.zeros, dtype=torch.int64, device="cuda")
        graphs.capture([longs(4), longs(4, 3)], REQUESTS)
        slots, paths = (torch.tensor(each).to("cuda") for each in ([5, 6, 7], [[1, 9]] * 3))
        (found,) = graphs(slots, paths)
        assert held(found).tolist() == [6, 7, 8]


def test_what_is_laid_out_lives_as_long_as_its_graph(gpu: Gpu) -> None:
    """A graph reads memory by its address, whatever it holds by then."""
    laid_out: list[weakref.ref[Any]] = []

    def lay_out(slots: torch.Tensor) -> torch.Tensor:
        rows = torch.ones_like(slots)
        laid_out.append(weakref.ref(rows))
        return rows

    graphs = RequestGraphs(lambda rows, slots: (slots + rows,), lay_out)
    with graphs_for(gpu, REQUESTS):
        graphs.capture([torch.zeros(4, dtype=torch.int64, device="cuda")], REQUESTS)
        assert len(laid_out) == len(REQUESTS)
        assert all(each() is not None for each in laid_out)


def test_larger_batches_have_no_graph(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = HiddenStateWorker._capture

    def capture(self: HiddenStateWorker, requests: Sequence[int]) -> None:
        stock(self, requests[:2])

    monkeypatch.setattr(HiddenStateWorker, "_capture", capture)
    found = served(gpu)
    assert {record.kernels["graph"] for record in found.steps} == {0, 2}


def stale(which: int, of: int) -> Callable[..., Any]:
    """What takes the place of a call: one of `of` inputs stays as it is."""
    stock = RequestGraphs.__call__

    def compute(self: RequestGraphs, *inputs: torch.Tensor) -> Any:
        given = [*inputs]
        if len(given) == of and self._inputs:
            given[which] = self._inputs[which][: len(inputs[0])].clone()
        return stock(self, *given)

    return compute


def with_a_graph_of_one(self: RequestGraphs, *inputs: torch.Tensor) -> Any:
    """What takes the place of a call."""
    if not self._graphs:
        return STOCK(self, *inputs)
    for buffer, given in zip(self._inputs, inputs, strict=True):
        buffer[tuple(map(slice, given.shape))].copy_(given)
    graph, results, _ = self._graphs[1]
    graph.replay()
    return tuple(each.repeat(len(inputs[0]), *[1] * (each.dim() - 1)) for each in results)


STOCK = RequestGraphs.__call__

FAULTS = {
    "slots of the trees before": stale(0, 2),
    "lengths of the trees before": stale(1, 2),
    "counts of the paths before": stale(2, 5),
    "hidden states of the paths before": stale(3, 5),
    "tokens of the paths before": stale(4, 5),
    "a graph of one request": with_a_graph_of_one,
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, id=what, marks=[] if row in (1, 3) else pytest.mark.full)
        for row, what in enumerate(FAULTS)
    ],
)
def test_faults_are_found(what: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestGraphs, "__call__", FAULTS[what])
    with pytest.raises(AssertionError):
        served(gpu)
