"""CUDA graphs of Lyanna's layer in vLLM, captured and replayed on the fake GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu.tensors import Gpu

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fake_gpu.vllm_v1 import Decoded
from fake_gpu.vllm_v1_cases import GREEDY, HOSTS, asked, both

from drafttree.vllm.drafters import layer_graphs
from drafttree.vllm.drafters.layer_graphs import LayerGraphs

SIZES = ((9, 12, 0), (6, 10, 0), (13, 5, 3))


def served(gpu: Gpu, name: str, *parameters: dict[str, Any]) -> Decoded:
    return both(*HOSTS[name], asked(SIZES, parameters), gpu)


def replays(found: Decoded) -> list[int]:
    return [record.kernels["graph"] for record in found.steps]


@pytest.mark.parametrize(
    ("name", "drafting"),
    [
        ("lyanna, in graphs", 3),
        ("lyanna of auto, in graphs", 2),
        ("lyanna with tables, in graphs", 2),
    ],
)
def test_steps_replay_graphs_of_the_layer(gpu: Gpu, name: str, drafting: int) -> None:
    """The steps along chains after the first, the trees if they are the layer's alone, and a
    forward over up to 16 tokens; more run without a graph."""
    found = served(gpu, name, GREEDY, GREEDY, GREEDY)
    assert replays(found).count(drafting + 1) > 2
    assert drafting in replays(found)
    for record in found.steps:
        assert {wait.what for wait in record.waits} <= {"an event"}
        assert len(record.waits) <= 1


def test_without_the_targets_graphs_there_are_none(gpu: Gpu) -> None:
    """As with `enforce_eager`, where the engine asks for no piecewise graphs."""
    found = served(gpu, "lyanna", GREEDY, GREEDY, GREEDY)
    assert not any(replays(found))


def stale(name: str, method: str) -> Callable[..., Any]:
    """What takes the place of a method: it leaves a buffer as it is."""
    stock = getattr(LayerGraphs, method)

    def call(self: Any, *args: Any) -> Any:
        kept = getattr(self._buffers, name, None)
        if kept is not None:
            setattr(self._buffers, name, kept.clone())
        try:
            return stock(self, *args)
        finally:
            if kept is not None:
                setattr(self._buffers, name, kept)

    return call


def of_half_the_rows(self: Any, size: int) -> torch.Tensor:
    return STOCK_READ(self, max(size // 2, 1)).repeat(2, 1)[:size]


def with_slots_of_other_rows(self: LayerGraphs, *args: Any) -> torch.Tensor:
    return STOCK_REPLAY(self, *args[:-1], args[-1].roll(1))


STOCK_READ, STOCK_REPLAY = LayerGraphs._read, LayerGraphs.read

FAULTS: dict[str, tuple[Any, str, Any]] = {
    "chains of the step before": (LayerGraphs, "unroll", stale("chains", "unroll")),
    "hidden states of the step before": (LayerGraphs, "read", stale("hidden", "read")),
    "positions of the step before": (LayerGraphs, "read", stale("positions", "read")),
    "lengths of the step before": (LayerGraphs, "read", stale("lengths", "read")),
    "rows of the step before": (LayerGraphs, "read", stale("starts", "read")),
    "a graph of half the rows": (LayerGraphs, "_read", of_half_the_rows),
    "slots of other rows": (LayerGraphs, "read", with_slots_of_other_rows),
    "padding that has a slot": (layer_graphs, "ABSENT", 0),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, id=what, marks=[] if row in (0, 5) else pytest.mark.full)
        for row, what in enumerate(FAULTS)
    ],
)
def test_faults_are_found(what: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, part, wrong = FAULTS[what]
    monkeypatch.setattr(owner, part, wrong)
    with pytest.raises(AssertionError):
        served(gpu, "lyanna, in graphs", GREEDY, GREEDY, GREEDY)
