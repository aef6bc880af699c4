"""A draft model's piecewise CUDA graphs in vLLM, captured and replayed on the fake GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu.tensors import CUDA, Gpu, held

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fake_gpu.vllm_graphs import context
from fake_gpu.vllm_v1_cases import GREEDY, HOSTS, asked, both
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from drafttree.vllm.drafters.draft_graphs import DraftGraphs

SIZES = ((9, 12, 0), (6, 10, 0), (13, 5, 3))
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def served(gpu: Gpu, *parameters: dict[str, Any]) -> Any:
    return both(*HOSTS["rsd, in graphs"], asked(SIZES, parameters), gpu)


def test_steps_replay_graphs_of_the_draft_model(gpu: Gpu) -> None:
    """Up to eight rows, padded to a captured number; more rows run without graphs."""
    found = served(gpu, GREEDY, {"temperature": 0.9, "seed": 3}, GREEDY)
    replays = [record.kernels["graph"] for record in found.steps]
    # Roots and three levels are read, in two pieces each.
    assert replays.count(8) > 2
    assert 0 in replays
    assert not any(record.waits for record in found.steps)


def test_stale_inputs_are_found(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = DraftGraphs.forward

    def forward(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        kept, self._positions = self._positions, self._positions.clone()
        try:
            return stock(self, input_ids, positions)
        finally:
            self._positions = kept

    monkeypatch.setattr(DraftGraphs, "forward", forward)
    with pytest.raises(AssertionError):
        served(gpu, GREEDY, GREEDY, GREEDY)


class Target(torch.nn.Module):
    """Does nothing."""

    def forward(self, **inputs: torch.Tensor) -> None:
        pass


class Draft(torch.nn.Module):
    """Notes its forwards: the number of rows, the mode, and the size of the graphs."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        self.part = torch.nn.Identity()
        self.part.do_not_compile = not compiled
        self.runs: list[tuple[int, CUDAGraphMode, int]] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        here = get_forward_context()
        assert here.batch_descriptor is not None
        mode = here.cudagraph_runtime_mode
        self.runs.append((len(input_ids), mode, here.batch_descriptor.num_tokens))
        return torch.stack((input_ids, positions), 1)


class Engine:
    """A target and a draft model, of which nothing serves requests."""

    def __init__(self, *, compiled: bool = True) -> None:
        self.draft, self.target, self.serves = Draft(compiled=compiled), Target(), False
        self.graphs = DraftGraphs(self.draft, 16, CUDA)
        self.graphs.capture_with(self.target, lambda: self.serves)

    def runs(self, mode: CUDAGraphMode, size: int) -> list[tuple[int, CUDAGraphMode, int]]:
        """What the draft model runs when the target runs so."""
        self.draft.runs = []
        with context(mode, size):
            ids = torch.zeros(size, dtype=torch.int32, device=CUDA)
            self.target(input_ids=ids, positions=ids.long())
        return self.draft.runs

    def reads(self, rows: int) -> list[tuple[int, CUDAGraphMode, int]]:
        """What the draft model runs to read some rows of a step, in a context of 16."""
        self.draft.runs = []
        with context(FULL, 16):
            ids = torch.arange(rows, dtype=torch.int32, device=CUDA)
            states = self.graphs.forward(ids + 5, ids.long() + 9)
        assert held(states).tolist() == [[row + 5, row + 9] for row in range(rows)]
        return self.draft.runs


def test_graphs_are_captured_with_the_targets_piecewise_ones_alone(gpu: Gpu) -> None:
    engine = Engine()
    assert engine.runs(NONE, 16) == [(16, NONE, 16)]  # it is compiled
    for mode in (NONE, FULL):
        assert engine.runs(mode, 8) == []
    assert engine.runs(PIECEWISE, 8) == [(8, NONE, 8), (8, PIECEWISE, 8)]
    assert engine.runs(PIECEWISE, 8) == []
    assert engine.runs(PIECEWISE, 2) == [(2, NONE, 2), (2, PIECEWISE, 2)]
    engine.serves = True
    assert engine.runs(PIECEWISE, 4) == []
    assert engine.reads(2) == [(2, PIECEWISE, 2)]
    assert engine.reads(5) == [(8, PIECEWISE, 8)]
    assert engine.reads(9) == [(9, NONE, 16)]


def test_graphs_are_captured_again_after_they_were_measured(gpu: Gpu) -> None:
    engine = Engine()
    engine.runs(NONE, 16)
    engine.runs(PIECEWISE, 8)
    engine.graphs.forget()
    assert engine.reads(8) == [(8, NONE, 16)]
    assert engine.runs(PIECEWISE, 8) == [(8, NONE, 8), (8, PIECEWISE, 8)]
    assert engine.reads(8) == [(8, PIECEWISE, 8)]


def test_without_graphs_nothing_is_captured(gpu: Gpu) -> None:
    """Neither for a target without piecewise graphs, nor of a model that is not compiled."""
    engine = Engine()
    assert engine.runs(NONE, 16) == [(16, NONE, 16)]
    assert engine.runs(FULL, 8) == []
    assert engine.reads(3) == [(3, NONE, 16)]
    eager = Engine(compiled=False)
    for mode in (NONE, PIECEWISE):
        assert eager.runs(mode, 8) == []
    assert eager.reads(3) == [(3, NONE, 16)]
